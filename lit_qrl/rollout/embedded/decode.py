"""Decoding in slots: one prefill per prompt, then one token of every row in a step.

Rows are batched in one of two ways. *Static*: all rows of a batch stand in one column of the cache, prompts padded in
front; the host looks at every step, and rows that have ended leave at once. *Continuous*: steps have fixed shapes and
wait for nothing, so that a GPU replays them as CUDA graphs; the host looks at which rows have ended a few steps after
the device knows, so that a row's slot goes on for some steps after its end, which are written nowhere, and other rows
take its place.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lit_qrl.network.head import SamplerHead
from lit_qrl.network.routing import Routing, routers, unrouted
from lit_qrl.network.structure import body, cached
from lit_qrl.rollout.embedded.cache import HeldRow, SlotCache
from lit_qrl.rollout.embedded.sampling import TokenSampler
from lit_qrl.rollout.graphs import Trust, recorded
from lit_qrl.types import Completion, SamplingParams

PREFILL_TOKENS = 16384
"""Padded prompt tokens of one prefill forward: enough to fill a GPU, with activations of a few hundred MB."""
CHECK = 4
"""Steps of continuous batching between two looks at which rows have ended, each at what was so at the look before."""
REFILL = 8
"""One slot in so many is free before the next prompts are prefilled, since a prefill holds up all rows."""
NARROW = 4
"""Rows get fewer where one slot in so many is left: a smaller step saves little, and recording it takes that of ten."""

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


def plan(
    lengths: Sequence[int], n: int, steps: int, tokens: int, max_rows: int | None, padded: bool = True
) -> Iterator[list[int]]:
    """Yield the completions of each decode batch, by their numbers, prompt-major: those of the longest prompts first.

    Args:
        lengths: tokens of each prompt.
        n: completions per prompt.
        steps: completion limit.
        tokens: cache columns times rows that fit into memory.
        max_rows: rows that a batch may have at most; None is no limit.
        padded: whether prompts of different lengths may be in one batch.

    >>> list(plan([2, 9], 2, 1, 40, None)), list(plan([2, 9], 2, 1, 30, None))
    ([[2, 3, 0, 1]], [[2, 3, 0], [1]])
    """
    order, begin = sorted(range(n * len(lengths)), key=lambda number: -lengths[number // n]), 0
    while begin < len(order):
        longest = lengths[order[begin] // n]
        fits = max(1, tokens // (longest + steps))
        end = min(len(order), begin + (fits if max_rows is None else min(fits, max_rows)))
        if not padded:
            end = next((i for i in range(begin, end) if lengths[order[i] // n] != longest), end)
        yield order[begin:end]
        begin = end


@dataclass(slots=True)
class Drawn:
    """What was drawn, on the device: rows in the order in which they were asked for.

    Args:
        tokens: "b steps".
        logprobs: "b steps", fp32.
        length: " b", tokens of each row with the stop token.
        stopped: " b", True where a stop token ended the row.
        routes: of each row "tokens layers k", the experts of prompt and completion, on the host; None where they are
            not recorded.
        cache: keys and values of all tokens but the last of each row, where they are kept.
        places: the cache's row of each.
        width: columns of the cache that the prompts take; a prompt ends in the last of them.
        kept: of each row and step, the ids " k" among which the token was drawn, on the host; None where they are not
            recorded.
    """

    tokens: Tensor
    logprobs: Tensor
    length: Tensor
    stopped: Tensor
    routes: list[Tensor] | None = None
    cache: SlotCache | None = None
    places: Sequence[int] = ()
    width: int = 0
    kept: list[list[Tensor]] | None = None

    def completions(self, version: int) -> list[Completion]:
        """Return the rows as completions, drawn by weights of that version."""
        columns = (column.tolist() for column in (self.tokens, self.logprobs, self.length, self.stopped))
        return [
            Completion(
                token_ids=tokens[:length],
                logprobs=logprobs[:length],
                finish_reason="stop" if stopped else "length",
                version=version,
                routed_experts=None if self.routes is None else self.routes[row],
                kept=None if self.kept is None else self.kept[row][:length],
            )
            for row, (tokens, logprobs, length, stopped) in enumerate(zip(*columns, strict=True))
        ]


Gone = Callable[[Sequence[int], Drawn], None]
"""Takes rows by their numbers, and what was drawn of them, on the host."""


class Leaving:
    """Copies ended rows to the host without waiting for the device, and gives them away when they have come.

    Args:
        drawn: of all rows, on the device; steps write to it.
        gone: takes the rows.
    """

    def __init__(self, drawn: Drawn, gone: Gone) -> None:
        self.drawn, self.gone = drawn, gone
        self._under_way: deque[tuple[list[int], Drawn, torch.cuda.Event | None]] = deque()

    def take(self, rows: Sequence[int], at: Tensor) -> None:
        """Ask for rows whose last token comes by a step that the device has been given already.

        Args:
            rows: their numbers.
            at: the same, on the device.
        """
        parts = self.drawn.tokens, self.drawn.logprobs, self.drawn.length, self.drawn.stopped
        tokens, logprobs, length, stopped = (part.index_select(0, at).to("cpu", non_blocking=True) for part in parts)
        done = None
        if at.is_cuda:
            done = torch.cuda.Event()
            done.record()
        self._under_way.append((list(rows), Drawn(tokens, logprobs, length, stopped), done))

    def hand(self) -> None:
        """Give away the rows that have come."""
        while self._under_way:
            rows, drawn, done = self._under_way[0]
            if done is not None and not done.query():
                return
            self._under_way.popleft()
            self.gone(rows, drawn)


@dataclass(slots=True)
class Rows:
    """What some slots are at, each " s" on the device; steps write over it.

    Args:
        token: the last one drawn, which the next step takes in.
        start: column of the cache in which the sequence begins.
        column: where that token goes; its position is `column − start`.
        row: of the results, that the slot draws.
        drawn: tokens of that row.
        ended: whether they are all there are.
    """

    token: Tensor
    start: Tensor
    column: Tensor
    row: Tensor
    drawn: Tensor
    ended: Tensor

    @classmethod
    def empty(cls, slots: int, device: torch.device) -> "Rows":
        """Return slots of which none is used."""
        token, start, column, row, drawn = torch.zeros(5, slots, dtype=torch.long, device=device)
        return cls(token, start, column, row, drawn, torch.ones(slots, dtype=torch.bool, device=device))

    def first(self, count: int) -> "Rows":
        """Return the first slots, in the same memory."""
        return Rows(*(getattr(self, field.name)[:count] for field in fields(self)))

    def put(self, slots: Tensor, rows: "Rows") -> None:
        """Write over some slots."""
        for field in fields(self):
            getattr(self, field.name).index_copy_(0, slots, getattr(rows, field.name))

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots over others."""
        self.put(targets, Rows(*(getattr(self, field.name).index_select(0, sources) for field in fields(self))))


@dataclass(slots=True)
class Seat:
    """What the host knows of a slot in use.

    Args:
        row: of the results.
        due: the step by which it has ended in any case.
    """

    row: int
    due: int


@dataclass(slots=True)
class Look:
    """What the device will have said of its slots.

    Args:
        found: "2 s", whether a slot has ended, and how many tokens it has drawn.
        rows: of the results, that each slot drew then.
        done: the copy; None where there is nothing to wait for.
    """

    found: Tensor
    rows: list[int | None]
    done: torch.cuda.Event | None


@dataclass(slots=True)
class Prefilled:
    """Sequences whose keys and values are known.

    Args:
        numbers: theirs: positions of prompts in the call.
        starts: " p", columns in which they begin.
        cache: one row each.
        logits: "p v" of their first tokens.
        routes: "p width layers k", where they are recorded.
    """

    numbers: list[int]
    starts: Tensor
    cache: SlotCache
    logits: Tensor
    routes: Tensor | None


class Decoder:
    """Draws completions of one Hugging Face causal language model.

    Args:
        network: the model, in eval mode.
        sampling: how tokens are drawn.
        head_dtype: that the output head computes in; None is its own.
        routes: record which experts every token takes; static batching alone.
        kept: record the ids among which every token is drawn; likewise.
        scales: of keys and values that the cache keeps in E4M3; None keeps them as they are.
        trust: what is known of recorded steps, and the memory of former ones, for continuous batching; a CPU launches
            every step. None is static batching.
    """

    def __init__(
        self,
        network: Any,
        sampling: SamplingParams,
        head_dtype: torch.dtype | None = None,
        routes: bool = False,
        kept: bool = False,
        scales: Tensor | None = None,
        trust: Trust | None = None,
    ) -> None:
        self.network, self.steps = network, sampling.max_tokens
        self.kept, self.scales, self.trust = kept, scales, trust
        self.routers = routers(network) if routes else []
        self.head = SamplerHead.of(network, head_dtype)
        self.device = network.get_input_embeddings().weight.device
        self.sampler, self._drawn_as = TokenSampler(sampling), repr(sampling)
        config = network.config.get_text_config()
        self.layers = config.num_hidden_layers
        # Layers with a window need their own mask, which the library derives from the two-dimensional one.
        self.windowed = windowed(config)
        stops = () if sampling.ignore_stop else sampling.stop_token_ids
        self.stops = torch.tensor(stops, dtype=torch.long, device=self.device)
        self.static, self._cuda = trust is None, self.device.type == "cuda"
        self.replays = self._cuda

    # A tensor of inference mode cannot tell that it was not written to, so that layers would not share its codes.
    @torch.no_grad()
    def run(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        rows: Sequence[int],
        random: Random,
        report: Callable[[int, int], None],
        slots: int | None = None,
        held: Mapping[int, HeldRow] | None = None,
        keep: bool = False,
        gone: Gone | None = None,
    ) -> Drawn:
        """Return some completions, which take the slots in their order.

        Args:
            prompts: all prompts of the call.
            n: completions of each.
            rows: the numbers of those that are drawn, prompt-major.
            random: what the tokens are drawn with; not asked for where decoding is greedy.
            report: called now and then with (sequences ended, tokens drawn).
            slots: rows that are decoded at once, fewer than all where batching is continuous alone; None is all.
            held: keys and values of the beginning of prompts, by their position in the call; static batching alone.
            keep: give the cache back with what was drawn; likewise.
            gone: takes rows that have ended while others are drawn; not all of them.
        """
        self.prompts, self.held, self.keep = prompts, held or {}, keep
        self.owner = [row // n for row in rows]
        total, lengths = len(rows), {len(prompts[prompt]) for prompt in self.owner}
        self.width = max(lengths)
        self.padded = self.windowed or len(lengths) > 1
        drawn = self._allocate(total, total if slots is None else slots)
        self.numbers = None
        if not self.sampler.greedy:
            given = {prompt: random(prompt, self.steps) for prompt in set(self.owner)}
            self.numbers = torch.stack([given[row // n][row % n] for row in rows]).to(self.device)
        leaving = None if gone is None else Leaving(drawn, gone)
        counts, ended, waiting = [0] * total, 0, min(total, self.slots)
        self._refill(range(waiting), 0)
        look: Look | None = None
        while True:
            latest = self._look()
            known, look = latest if self.static else look, latest
            over = set() if known is None else self._read(known, counts)
            done = []
            for slot, seat in enumerate(self.seats):
                if seat is not None and (seat.row in over or seat.due <= self.now):
                    self.seats[slot] = None
                    done.append(seat.row)
            ended += len(done)
            report(ended, sum(counts))
            if leaving is not None:
                if done:
                    leaving.take(done, self._on(done))
                leaving.hand()
            free = [slot for slot, seat in enumerate(self.seats) if seat is None]
            share = min(total - waiting, len(free))
            if share and (share == total - waiting or len(free) * REFILL >= self.slots):
                self._refill(free[:share], waiting)
                waiting += share
            if not any(self.seats):
                break
            if waiting == total:
                self._narrow()
            steps = 1 if self.static else CHECK
            until = min(self.now + steps, *(seat.due for seat in self.seats if seat is not None))
            while self.now < until:
                self._advance()
                self.now += 1
        report(total, int(drawn.length.sum()))
        if self.routes is not None:
            begins = [self.width - len(prompts[prompt]) for prompt in self.owner]
            taken = zip(self.routes.cpu(), begins, drawn.length.tolist(), strict=True)
            drawn.routes = [one[begin : self.width + length] for one, begin, length in taken]
        if self._ids:
            drawn.kept = _by_token(self._ids, *drawn.tokens.shape)
        if keep:
            places = sorted(range(total), key=self.occupants.__getitem__)
            drawn.cache, drawn.places, drawn.width = self.cache, places, self.width
        return drawn

    def _allocate(self, rows: int, slots: int) -> Drawn:
        """Make the slots, and the results, with one row more for what is drawn after a row's end."""
        self.slots = self.size = slots
        self.now = 0
        self._held: Prefilled | None = None
        self.state = Rows.empty(slots, self.device)
        self.seats: list[Seat | None] = [None] * slots
        self.occupants = list(range(slots))
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._staging = [torch.empty(2, slots, dtype=torch.long, pin_memory=self._cuda) for _ in range(2)]
        self.cache = SlotCache(self.layers, slots, self.width + self.steps, self.scales)
        self.cache.filled, self.cache.at = self.width, None if self.static else self.state.column
        self.columns = torch.arange(self.cache.columns, device=self.device)
        self.tokens = torch.zeros(rows + 1, self.steps, dtype=torch.long, device=self.device)
        self.logprobs = torch.zeros(rows + 1, self.steps, dtype=torch.float32, device=self.device)
        self.length = torch.full((rows + 1,), self.steps, device=self.device)
        self.stopped = torch.zeros(rows + 1, dtype=torch.bool, device=self.device)
        self.routes: Tensor | None = None
        self._ids: list[tuple[Tensor, Tensor]] = []
        return Drawn(self.tokens[:-1], self.logprobs[:-1], self.length[:-1], self.stopped[:-1])

    def forget(self) -> None:
        """Give back the memory of what was being drawn when memory ran out."""
        self.cache, self.graphs, self._held = SlotCache(0, 0, 0), {}, None

    # -------------------------------------------------------------------------------------------------------- prompts

    def _refill(self, slots: Sequence[int], first: int) -> None:
        """Begin the next rows in free slots.

        Args:
            slots: which.
            first: of the rows.
        """
        owners, done = self.owner[first : first + len(slots)], 0
        wanted = list(dict.fromkeys(owners))
        share = self._held if self._held is not None and self._held.numbers[-1] == wanted[0] else None
        while done < len(owners):
            if share is None:
                widest = self.width if self.static else max(len(self.prompts[prompt]) for prompt in wanted)
                part = wanted[: max(1, PREFILL_TOKENS // widest)]
                share = self._prefilled(part)
            there = set(share.numbers)
            wanted = [prompt for prompt in wanted if prompt not in there]
            of = [owner for owner in owners[done:] if owner in there]
            self._begin(share, of, slots[done : done + len(of)], first + done)
            done += len(of)
            self._held, share = None if self.static else share, None

    def _prefilled(self, numbers: list[int]) -> Prefilled:
        """Compute some prompts, which end in one column where batching is static, and begin in column 0 otherwise.

        Of prompts whose beginning is held, the last tokens alone are computed, of all as many as of the one of which
        the least is held.
        """
        sequences = [self.prompts[number] for number in numbers]
        count, width = len(sequences), self.width if self.static else max(map(len, sequences))
        begins = [width - len(one) if self.static else 0 for one in sequences]
        rows = zip(begins, sequences, strict=True)
        tokens = torch.tensor([[*[0] * begin, *one, *[0] * (width - begin - len(one))] for begin, one in rows])
        known = {row: self.held[number] for row, number in enumerate(numbers) if number in self.held}
        new = width
        if known:
            new = max(len(one) - (known[row].shared(one) if row in known else 0) for row, one in enumerate(sequences))
        cache = SlotCache(self.layers, count, width, self.scales)
        if new < width:
            cache.restore(known, [max(0, len(one) - new) for one in sequences], width - new)
            cache.filled = width - new
        starts = self._on(begins)
        position = torch.arange(width, device=self.device) - starts[:, None]
        seen = position >= 0  # what stands behind a sequence's end is seen by nothing before it
        states, routes = self._states(
            cache,
            input_ids=self._on(tokens[:, width - new :]),
            attention_mask=seen.long() if any(begins) else None,
            position_ids=position.clamp_(min=0)[:, width - new :],
        )
        cache.filled = width
        ends = self._on([begin + len(one) - 1 - (width - new) for begin, one in zip(begins, sequences, strict=True)])
        logits = self.head.logits(states[torch.arange(count, device=self.device), ends])
        if routes is not None:
            routes = routes.masked_fill(~seen[:, :, None, None], unrouted(routes.dtype))
        return Prefilled(numbers, starts, cache, logits, routes)

    def _begin(self, share: Prefilled, owners: Sequence[int], slots: Sequence[int], first: int) -> None:
        """Copy prompts into slots and draw their first tokens."""
        rows = range(first, first + len(slots))
        places = {number: place for place, number in enumerate(share.numbers)}
        of = self._on([places[owner] for owner in owners])
        at = self._on(list(slots))
        self.cache.place(share.cache, of, at)
        start = Rows.empty(len(slots), self.device)
        start.start.copy_(share.starts.index_select(0, of))
        start.column.copy_(start.start + self._on([len(self.prompts[owner]) for owner in owners]))
        start.row.copy_(self._on(list(rows)))
        start.ended.fill_(False)
        if share.routes is not None:
            taken = share.routes
            if self.routes is None:
                shape = len(self.owner), self.width + self.steps, *taken.shape[2:]
                self.routes = taken.new_full(shape, unrouted(taken.dtype))
            self.routes[start.row, : self.width] = taken.index_select(0, of)
        self._draw(start, share.logits.index_select(0, of))
        self.state.put(at, start)
        for slot, row in zip(slots, rows, strict=True):
            self.seats[slot] = Seat(row, self.now + self.steps - 1)

    def _on(self, numbers: Tensor | Sequence[int]) -> Tensor:
        """Return numbers on the device, without waiting for it."""
        tensor = torch.as_tensor(numbers)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self._cuda else tensor.to(self.device)

    def _states(self, cache: SlotCache, **inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the last hidden states "rows columns h", and the experts "rows columns layers k" where recorded."""
        with Routing(self.network, found=self.routers).applied() if self.routers else nullcontext() as routing:
            states = body(self.network)(**inputs, **cached(self.network, cache)).last_hidden_state
        return states, None if routing is None else routing.own.unflatten(0, inputs["input_ids"].shape)

    # ---------------------------------------------------------------------------------------------------------- steps

    def _advance(self) -> None:
        """Take one step of the first `size` slots: launched once in a run's life, then recorded, then replayed."""
        trust, kind = self.trust, (self.size, self._drawn_as)
        if self.size in self.graphs:
            self.graphs[self.size].replay()
        elif trust is not None and self.replays and not trust.broken and kind in trust.launched:
            rows = self.state.first(self.size)
            results = (rows.token, rows.column, rows.drawn, rows.ended)
            graph = recorded(self._step, results, trust, self.device, trust.former)
            if graph is not None:
                self.graphs[self.size] = trust.former = graph
        else:
            self._step()
            if trust is not None:
                trust.launched.add(kind)

    def _step(self) -> None:
        """Take the last token of the first `size` slots in and draw the next; nothing waits for the device."""
        rows = self.state.first(self.size)
        inputs: dict[str, Any] = {}
        self.cache.rows, seen = self.size, None
        if not self.static:
            self.cache.at = inputs["last_columns"] = rows.column
            seen = (self.columns <= rows.column[:, None])[:, None, None, :]
        elif self.padded:
            seen = self.columns[: self.cache.filled + 1] >= rows.start[:, None]
            seen = seen.long() if self.windowed else seen[:, None, None, :]
        position = (rows.column - rows.start)[:, None]
        states, routes = self._states(
            self.cache, input_ids=rows.token[:, None], attention_mask=seen, position_ids=position, **inputs
        )
        self.cache.filled += 1  # where all rows have one last column
        if routes is not None and self.routes is not None:
            self.routes[rows.row, rows.column] = routes[:, -1]
        rows.column.add_(~rows.ended)
        self._draw(rows, self.head.logits(states[:, -1]))

    def _draw(self, rows: Rows, logits: Tensor) -> None:
        """Draw a token of each row that has not ended and write it down.

        Args:
            rows: which.
            logits: "s v".
        """
        at = rows.drawn.clamp(max=self.steps - 1)
        tokens, logprobs = self.sampler.drawn(logits, None if self.numbers is None else self.numbers[rows.row, at])
        if self.kept:
            of, ids = (self.sampler.processed(logits) > -torch.inf).nonzero(as_tuple=True)
            self._ids.append((rows.row[of] * self.steps + at[of], ids.int()))
        to = rows.row.masked_fill(rows.ended, len(self.tokens) - 1)
        rows.drawn.add_(~rows.ended)
        stopped = (tokens[:, None] == self.stops).any(dim=1)
        self.tokens[to, at] = tokens
        self.logprobs[to, at] = logprobs
        self.length[to] = rows.drawn
        self.stopped[to] = stopped
        rows.token.copy_(tokens)
        rows.ended.logical_or_(stopped | (rows.drawn >= self.steps))

    # ----------------------------------------------------------------------------------------------------------- ends

    def _look(self) -> Look:
        """Ask the device what its slots are at, without waiting for the answer."""
        self._staging.reverse()  # the other answer may still be to be read
        found, done = self._staging[0], None
        found.copy_(torch.stack((self.state.ended.long(), self.state.drawn)), non_blocking=self._cuda)
        if self._cuda:
            done = torch.cuda.Event()
            done.record()
        return Look(found, [None if seat is None else seat.row for seat in self.seats], done)

    def _read(self, look: Look, counts: list[int]) -> set[int]:
        """Return the rows that had ended; note the tokens of all of them in `counts`."""
        if look.done is not None:
            look.done.synchronize()
        ended, drawn = look.found.tolist()
        for slot, row in enumerate(look.rows):
            if row is not None:
                counts[row] = drawn[slot]
        return {row for slot, row in enumerate(look.rows) if row is not None and ended[slot]}

    def _narrow(self) -> None:
        """Step fewer slots where few rows are left, or those alone that are; they move to the first ones."""
        live = [slot for slot, seat in enumerate(self.seats) if seat is not None]
        if self.static:
            size = len(live)
        elif len(live) * NARROW > self.size:
            return
        else:
            size = min(self.slots, 2 ** (len(live) - 1).bit_length())  # of the few sizes that steps are recorded for
        self.size = size
        sources = [slot for slot in live if slot >= size]
        targets = [slot for slot in range(size) if self.seats[slot] is None][: len(sources)]
        if sources:
            self.cache.move(self._on(sources), self._on(targets), swap=self.keep)
            self.state.move(self._on(sources), self._on(targets))
            seats, rows = self.seats, self.occupants
            for source, target in zip(sources, targets, strict=True):
                seats[target], seats[source] = seats[source], None
                rows[target], rows[source] = rows[source], rows[target]


def _by_token(kept: Sequence[tuple[Tensor, Tensor]], rows: int, steps: int) -> list[list[Tensor]]:
    """Return the ids that were kept of each row and step, on the host.

    Args:
        kept: of each step, " n" the numbers of the tokens that ids belong to, row × steps + step, and the ids.
        rows: of the batch.
        steps: of each.
    """
    owners, ids = (torch.cat(parts) for parts in zip(*kept, strict=True))
    counts = owners.bincount(minlength=rows * steps).tolist()
    of = iter(ids[owners.argsort(stable=True)].cpu().split(counts))
    return [list(islice(of, steps)) for _ in range(rows)]
