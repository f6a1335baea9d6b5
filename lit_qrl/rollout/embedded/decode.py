"""Batched decoding over a static cache: one prefill per prompt, ended rows dropped at once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_qrl.network.head import SamplerHead
from lit_qrl.network.routing import Routing, routers, unrouted
from lit_qrl.network.structure import body, cached
from lit_qrl.rollout.embedded.cache import HeldRow, SlotCache
from lit_qrl.rollout.embedded.cache_scales import Rounding
from lit_qrl.rollout.embedded.flight import Flight
from lit_qrl.rollout.embedded.sampling import TokenSampler
from lit_qrl.types import SamplingParams

PREFILL_TOKENS = 16384
"""Padded prompt tokens of one prefill forward: enough to fill a GPU, with activations of a few hundred MB."""


NOTHING: Mapping[int, HeldRow] = MappingProxyType({})
"""Of no sequence is anything held."""

Random = Callable[[int, int], Tensor]
"""Gives the uniform numbers "n steps" of a prompt's completions, by the prompt's position and the steps."""


def windowed(config: Any) -> bool:
    """Return whether some layers of a model see a part of the past alone.

    Args:
        config: of its text part.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    return bool(kinds & {"sliding_attention", "chunked_attention"}) or bool(
        getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    )


@dataclass(slots=True)
class Piece:
    """Some completions of one prompt.

    Args:
        prompt: position of the prompt in the call.
        first: number of the first of these completions among the prompt's.
        count: how many.
        length: tokens of the prompt.
    """

    prompt: int
    first: int
    count: int
    length: int


def plan(
    lengths: Sequence[int], n: int, steps: int, tokens: int, max_rows: int | None, padded: bool = True
) -> Iterator[list[Piece]]:
    """Yield the pieces of each decode batch, longest prompts first.

    Args:
        lengths: tokens of each prompt.
        n: completions per prompt.
        steps: completion limit.
        tokens: cache columns times rows that fit into memory.
        max_rows: rows that a batch may have at most; None is no limit.
        padded: whether prompts of different lengths may be in one batch.

    >>> [[(p.prompt, p.count) for p in pieces] for pieces in plan([2, 9], 2, 1, 40, None)]
    [[(1, 2), (0, 2)]]
    """
    batch: list[Piece] = []
    room = 0
    for prompt in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        first = 0
        if batch and not padded and batch[0].length != lengths[prompt]:
            room = 0
        while first < n:
            if room == 0:
                if batch:
                    yield batch
                batch = []
                room = max(1, tokens // (lengths[prompt] + steps))
                room = room if max_rows is None else min(room, max_rows)
            count = min(n - first, room)
            batch.append(Piece(prompt, first, count, lengths[prompt]))
            first, room = first + count, room - count
    if batch:
        yield batch


def split(pieces: Sequence[Piece], rows: int) -> list[list[Piece]]:
    """Return the pieces of a batch as batches of at most so many rows, in their order.

    >>> [[(p.prompt, p.first, p.count) for p in part] for part in split([Piece(0, 0, 3, 9), Piece(1, 0, 1, 9)], 2)]
    [[(0, 0, 2)], [(0, 2, 1), (1, 0, 1)]]
    """
    batches: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        taken = 0
        while taken < piece.count:
            if not room:
                batches.append([])
                room = rows
            count = min(piece.count - taken, room)
            batches[-1].append(Piece(piece.prompt, piece.first + taken, count, piece.length))
            taken, room = taken + count, room - count
    return batches


@dataclass(slots=True)
class Drawn:
    """What one decode batch drew, on the device: rows in the order of its pieces.

    Args:
        tokens: "b steps".
        logprobs: "b steps", fp32.
        length: " b", tokens of each row with the stop token.
        stopped: " b", True where a stop token ended the row.
        routes: "b width+steps layers k", the experts of each token behind the left padding of its prompt; None where
            they are not recorded.
        cache: keys and values of all tokens but the last of each row, where they are kept.
        places: " b", the cache's row of each.
        width: columns of the cache that the prompts take; a prompt ends in the last of them.
        kept: " n", the ids among which the tokens were drawn, row by row and step by step, and "b steps", how many of
            them belong to each token; None where they are not recorded.
        versions: "b steps", which weights drew each token; None where they could not change on the way.
    """

    tokens: Tensor
    logprobs: Tensor
    length: Tensor
    stopped: Tensor
    routes: Tensor | None = None
    cache: SlotCache | None = None
    places: Tensor | None = None
    width: int = 0
    kept: tuple[Tensor, Tensor] | None = None
    versions: Tensor | None = None


class Decoder:
    """Runs decode batches of one Hugging Face causal language model.

    Args:
        network: the model, in eval mode.
        sampling: how tokens are drawn.
        head_dtype: that the output head computes in; None is its own.
        routes: record which experts every token takes.
        kept: record the ids among which every token is drawn.
        flight: lets new weights in between two steps; None where none come.
        rounding: of the keys and values that the cache keeps; None keeps them as they are.
    """

    def __init__(
        self,
        network: Any,
        sampling: SamplingParams,
        head_dtype: torch.dtype | None = None,
        routes: bool = False,
        kept: bool = False,
        flight: Flight | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        self.network, self.sampling, self.kept, self.flight = network, sampling, kept, flight
        self.rounding = rounding
        self.routers = routers(network) if routes else []
        self.head = SamplerHead.of(network, head_dtype)
        self.device = network.get_input_embeddings().weight.device
        self.sampler = TokenSampler(sampling)
        config = network.config.get_text_config()
        self.layers = config.num_hidden_layers
        # Layers with a window need their own mask, which the library derives from the two-dimensional one.
        self.windowed = windowed(config)
        stops = () if sampling.ignore_stop else sampling.stop_token_ids
        self.stops = torch.tensor(stops, dtype=torch.long, device=self.device)

    @torch.inference_mode()
    def run(
        self,
        prompts: Sequence[Sequence[int]],
        pieces: list[Piece],
        random: Random,
        report: Callable[[int, int], None],
        held: Mapping[int, HeldRow] = NOTHING,
        keep: bool = False,
        ended: Callable[["Drawn", Tensor], None] | None = None,
    ) -> Drawn:
        """Return the completions of one batch.

        Args:
            prompts: all prompts of the call.
            pieces: the rows of this batch.
            random: what the tokens are drawn with; not asked for where decoding is greedy.
            report: called after each step with (sequences ended in this batch, tokens drawn in this batch).
            held: keys and values of the beginning of prompts, by their position in the call.
            keep: give the cache back with what was drawn.
            ended: called after a step in which rows drew their last token before the limit, with what is drawn so far
                and their numbers.
        """
        steps, width = self.sampling.max_tokens, max(piece.length for piece in pieces)
        counts = torch.tensor([piece.count for piece in pieces])
        rows = int(counts.sum())
        cache = SlotCache(self.layers, rows, width + steps, self.rounding)
        lengths = torch.tensor([piece.length for piece in pieces])
        known = {row: held[piece.prompt] for row, piece in enumerate(pieces) if piece.prompt in held}
        logits, routes = self._prefill([prompts[piece.prompt] for piece in pieces], known, counts, width, cache)
        numbers = None
        if not self.sampler.greedy:
            parts = [random(p.prompt, steps)[p.first : p.first + p.count] for p in pieces]
            numbers = torch.cat(parts).to(self.device)
        positions = lengths.repeat_interleave(counts).to(self.device)
        valid = None
        if self.windowed or int(lengths.min()) < width:
            columns = torch.arange(width + steps, device=self.device)
            valid = columns >= (width - positions)[:, None]
        drawn = Drawn(
            tokens=torch.zeros(rows, steps, dtype=torch.long, device=self.device),
            logprobs=torch.zeros(rows, steps, dtype=torch.float32, device=self.device),
            length=torch.full((rows,), steps, device=self.device),
            stopped=torch.zeros(rows, dtype=torch.bool, device=self.device),
            routes=None if routes is None else F.pad(routes, (0, 0, 0, 0, 0, steps), value=unrouted(routes.dtype)),
        )
        if self.flight is not None:
            drawn.versions = torch.full((rows, steps), self.flight.version)
        of_rows = [prompts[piece.prompt] for piece in pieces for _ in range(piece.count)]
        places = self._decode(cache, logits, positions, valid, numbers, drawn, report, keep, ended, of_rows)
        if keep:
            drawn.cache, drawn.places, drawn.width = cache, places, width
        return drawn

    def _hidden(self, cache: SlotCache, **inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the last hidden state "rows h" of some columns, and their experts "rows columns layers k"."""
        with Routing(self.network, found=self.routers) if self.routers else nullcontext() as routing:
            hidden = body(self.network)(**inputs, **cached(self.network, cache)).last_hidden_state[:, -1]
        shape = inputs["input_ids"].shape
        return hidden, None if routing is None else routing.own.unflatten(0, shape)

    def _prefill(
        self,
        prompts: list[Sequence[int]],
        held: Mapping[int, HeldRow],
        counts: Tensor,
        width: int,
        cache: SlotCache,
    ) -> tuple[Tensor, Tensor | None]:
        """Fill the cache with every prompt's keys and values; return the logits "rows v" of the first token, and the
        prompts' experts "rows width layers k" where they are recorded, which takes prompts of which nothing is held.

        Of prompts whose beginning is held, the last tokens alone are computed, of all in a share as many as of the one
        of which the least is held.
        """
        logits, taken, row = [], [], 0
        share = max(1, PREFILL_TOKENS // width)
        for start in range(0, len(prompts), share):
            part = prompts[start : start + share]
            rows = {index: held[start + index] for index in range(len(part)) if start + index in held}
            shared = [rows[index].shared(prompt) if index in rows else 0 for index, prompt in enumerate(part)]
            new = max(len(prompt) - count for prompt, count in zip(part, shared, strict=True)) if rows else width
            tokens = torch.zeros(len(part), width, dtype=torch.long)
            mask = torch.zeros(len(part), width, dtype=torch.long)
            for index, prompt in enumerate(part):
                tokens[index, width - len(prompt) :] = torch.tensor(prompt)
                mask[index, width - len(prompt) :] = 1
            tokens, mask = tokens.to(self.device), mask.to(self.device)
            padded = any(len(prompt) < width for prompt in part)
            # A prompt of one completion each, all in one share: the cache itself takes what is computed.
            alone = len(part) == len(counts) == cache.capacity
            once = cache if alone else SlotCache(self.layers, len(part), width, self.rounding)
            if new < width:
                once.restore(rows, [max(0, len(prompt) - new) for prompt in part], width - new)
                once.filled = width - new
            hidden, routes = self._hidden(
                once,
                input_ids=tokens[:, width - new :],
                attention_mask=mask if padded else None,
                position_ids=(mask.cumsum(1) - 1).clamp_(min=0)[:, width - new :],
            )
            once.filled = width
            share_counts = counts[start : start + share].to(self.device)
            if not alone:
                cache.take(once, share_counts, row)
            row += int(share_counts.sum())
            logits.append(self.head.logits(hidden).repeat_interleave(share_counts, dim=0))
            if routes is not None:
                routes = routes.masked_fill(mask[:, :, None, None] == 0, unrouted(routes.dtype))
                taken.append(routes.repeat_interleave(share_counts, dim=0))
        cache.filled = width
        return torch.cat(logits), torch.cat(taken) if taken else None

    def _forward(
        self, tokens: Tensor, positions: Tensor, valid: Tensor | None, cache: SlotCache
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits "rows v" after one more token of every live row, and that token's experts."""
        mask = None
        if valid is not None:
            mask = valid[:, : cache.filled + 1]
            mask = mask.long() if self.windowed else mask[:, None, None, :]
        hidden, routes = self._hidden(
            cache, input_ids=tokens[:, None], attention_mask=mask, position_ids=positions[:, None]
        )
        cache.filled += 1
        return self.head.logits(hidden), routes

    def _decode(
        self,
        cache: SlotCache,
        logits: Tensor,
        positions: Tensor,
        valid: Tensor | None,
        random: Tensor | None,
        drawn: Drawn,
        report: Callable[[int, int], None],
        keep: bool,
        handed: Callable[[Drawn, Tensor], None] | None,
        prompts: Sequence[Sequence[int]],
    ) -> Tensor:
        """Draw until all rows have ended, and return the cache's row of each where they are kept."""
        order = rows = torch.arange(len(logits), device=self.device)
        total, steps = 0, drawn.tokens.shape[1]
        kept: list[tuple[Tensor, Tensor]] = []
        for step in range(steps):
            scores = self.sampler.processed(logits)
            tokens, logprobs = self.sampler.draw(scores, None if random is None else random[rows, step])
            if self.kept:
                row, ids = (scores > -torch.inf).nonzero(as_tuple=True)
                kept.append((rows[row] * steps + step, ids.int()))
            drawn.tokens[rows, step] = tokens
            drawn.logprobs[rows, step] = logprobs
            total += len(rows)
            ended = torch.isin(tokens, self.stops)
            over = ended.nonzero()[:, 0]
            if len(over):
                drawn.length[rows[over]] = step + 1
                drawn.stopped[rows[over]] = True
                if handed is not None:
                    handed(drawn, rows[over])
                live = len(rows) - len(over)
                # The last live rows move into the places of the ended ones, so that few rows are copied.
                targets = over[over < live]
                sources = (~ended[live:]).nonzero()[:, 0] + live
                order[torch.cat([targets, sources])] = order[torch.cat([sources, targets])]
                for tensor in (tokens, positions, *(() if valid is None else (valid,))):
                    tensor[targets] = tensor[sources]
                rows, tokens, positions = rows[:live], tokens[:live], positions[:live]
                valid = None if valid is None else valid[:live]
                if live and len(targets):
                    cache.move(sources, targets, swap=keep)
                cache.rows = live
            last = step + 1 == drawn.tokens.shape[1]
            report(len(drawn.tokens) if last else len(drawn.tokens) - len(rows), total)
            if last or len(rows) == 0:
                break
            column, again = cache.filled, False
            if self.flight is not None and self.flight.changed():
                assert drawn.versions is not None
                drawn.versions[:, step + 1 :] = self.flight.version
                again = self.flight.recompute
            if again:
                cache, logits, routes = self._again(prompts, drawn, rows, step + 1, cache)
            else:
                logits, routes = self._forward(tokens, positions, valid, cache)
            if routes is not None and drawn.routes is not None:
                drawn.routes[rows, column] = routes[:, -1]  # the tokens before keep those that they were drawn by
            positions = positions + 1
        if kept:
            drawn.kept = _by_token(kept, drawn.tokens.shape)
        return order.argsort()

    def _again(
        self, prompts: Sequence[Sequence[int]], drawn: Drawn, rows: Tensor, step: int, old: SlotCache
    ) -> tuple[SlotCache, Tensor, Tensor | None]:
        """Return a cache that prompts and `step` tokens of live rows fill anew, the logits after them, and experts."""
        drawn_now = drawn.tokens[rows, :step].tolist()
        sequences: list[Sequence[int]] = [
            [*prompts[row], *new] for row, new in zip(rows.tolist(), drawn_now, strict=True)
        ]
        cache = SlotCache(self.layers, len(sequences), old.max_length, self.rounding)
        ones = torch.ones(len(sequences), dtype=torch.long)
        return cache, *self._prefill(sequences, {}, ones, old.filled + 1, cache)


def _by_token(kept: Sequence[tuple[Tensor, Tensor]], shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the ids that were kept, token by token, and how many there are of each.

    Args:
        kept: of each step, " n" the numbers of the tokens that ids belong to, and the ids.
        shape: rows and steps; a token's number is row × steps + step.
    """
    owners, ids = (torch.cat(parts) for parts in zip(*kept, strict=True))
    return ids[owners.argsort(stable=True)], owners.bincount(minlength=shape[0] * shape[1]).view(*shape)
