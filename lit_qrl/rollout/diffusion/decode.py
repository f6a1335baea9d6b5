"""Semi-autoregressive denoising of a batch: blocks from left to right, in each step the surest tokens of the block."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lit_qrl.functional.diffusion import blocks_of, confidence, gumbel_argmax, most_confident
from lit_qrl.functional.logprobs import CHUNK_ELEMENTS
from lit_qrl.network.denoising import Layout
from lit_qrl.network.head import SamplerHead
from lit_qrl.rollout.diffusion.cache import CanvasCache
from lit_qrl.rollout.embedded.decode import Drawn, Piece
from lit_qrl.rollout.embedded.sampling import truncate
from lit_qrl.types import SamplingParams

Reuse = Literal["none", "prompt", "blocks"]
RowSeed = Callable[[int, int], int]
"""Gives the seed of a completion's noise, by the prompt's position and the completion's number among the prompt's."""


@dataclass(slots=True, kw_only=True)
class Denoised(Drawn):
    """Completions of one batch; their log-probs are estimated afterwards.

    Args:
        unmasked_at: "b length", the step at which each token was unmasked; −1 for one that never was.
    """

    unmasked_at: Tensor


class Denoiser:
    """Runs batches of one masked-diffusion model.

    Args:
        network: the model, in eval mode.
        sampling: how tokens are drawn; `max_tokens` is a multiple of `block`.
        block: positions of a block.
        steps: of a block, each of which unmasks `block / steps` tokens.
        reuse: keys and values that a block's steps after the first take over from its first: `none`; of what is left
            of the block (`prompt`); of all other `blocks` too.
        head_dtype: that the output head computes in; None is its own.
    """

    def __init__(
        self,
        network: Any,
        sampling: SamplingParams,
        block: int,
        steps: int,
        reuse: Reuse = "none",
        head_dtype: torch.dtype | None = None,
    ) -> None:
        self.network, self.sampling = network, sampling
        self.block, self.steps, self.reuse = block, steps, reuse
        self.head = SamplerHead.of(network, head_dtype)
        self.device = network.get_input_embeddings().weight.device
        self.mask_token: int = network.config.mask_token_id
        stops = () if sampling.ignore_stop else sampling.stop_token_ids
        self.stops = torch.tensor(stops, dtype=torch.long, device=self.device)

    @torch.inference_mode()
    def run(
        self,
        prompts: Sequence[Sequence[int]],
        pieces: list[Piece],
        row_seed: RowSeed,
        report: Callable[[int, int], None],
    ) -> Denoised:
        """Return the completions of one batch.

        Args:
            prompts: all prompts of the call.
            pieces: the rows of this batch.
            row_seed: of each completion's noise.
            report: called after each block with (sequences ended in this batch, tokens unmasked in this batch).
        """
        length, width = self.sampling.max_tokens, max(piece.length for piece in pieces)
        counts = torch.tensor([piece.count for piece in pieces])
        start = torch.full((len(pieces), width + length), self.mask_token)
        for row, piece in enumerate(pieces):
            start[row, width - piece.length : width] = torch.tensor(prompts[piece.prompt])
        lengths = [piece.length for piece in pieces]
        owner = torch.arange(len(pieces)).repeat_interleave(counts).to(self.device)
        once = Layout.of(lengths, [length] * len(pieces), width, length, self.device)
        canvas, layout = start.to(self.device)[owner], once.rows(owner)
        seeds = [row_seed(piece.prompt, piece.first + i) for piece in pieces for i in range(piece.count)]
        noise = [torch.Generator(self.device).manual_seed(seed) for seed in seeds]
        b, columns = len(owner), torch.arange(length, device=self.device)
        drawn = Denoised(
            tokens=torch.full((b, length), self.mask_token, device=self.device),
            logprobs=torch.zeros(b, length, device=self.device),
            length=torch.full((b,), length, device=self.device),
            stopped=torch.zeros(b, dtype=torch.bool, device=self.device),
            unmasked_at=torch.full((b, length), -1, device=self.device),
        )
        rows, total = torch.arange(b, device=self.device), 0
        # The canvases of a prompt's completions are still the same: its first states serve all of them.
        first = once.states(self.network, start.to(self.device)) if self.reuse == "none" else None
        for number, part in enumerate(blocks_of(length, self.block)):
            states = None if first is None else first[owner, width + part.start : width + part.stop]
            first = None
            when = self._fill(canvas, layout, slice(width + part.start, width + part.stop), noise, states)
            drawn.unmasked_at[rows, part] = when + number * self.steps
            drawn.tokens[rows, part] = canvas[:, width + part.start : width + part.stop]
            total += len(rows) * self.block
            ends = torch.isin(drawn.tokens[rows], self.stops) & (columns < part.stop)
            over = ends.any(dim=1)
            drawn.stopped[rows] = over
            drawn.length[rows[over]] = ends[over].int().argmax(dim=1) + 1
            live = (~over).nonzero()[:, 0]
            if len(live) < len(rows):
                rows, canvas, layout = rows[live], canvas[live], layout.rows(live)
                noise = [noise[i] for i in live.tolist()]
            last = part.stop == length
            report(b if last else b - len(rows), total)
            if not len(rows):
                break
        return drawn

    def _fill(
        self, canvas: Tensor, layout: Layout, part: slice, noise: list[torch.Generator], states: Tensor | None
    ) -> Tensor:
        """Unmask a block of the canvas in place and return the step, "b block", at which each token was.

        Args:
            canvas: "b s".
            layout: of its rows.
            part: columns of the block.
            noise: generator of each row.
            states: hidden states of the first step, "b block h", where they are known.
        """
        block = canvas[:, part]
        masked = torch.ones_like(block, dtype=torch.bool)
        when = torch.zeros_like(block)
        cache = None if self.reuse == "none" else CanvasCache(self._layers, canvas.shape[1])
        for step in range(self.steps):
            if step or states is None:
                states = self._states(canvas, layout, part, cache, whole=step == 0)
            tokens, sure = self._draw(states, noise)
            chosen = most_confident(sure, masked, self.block // self.steps)
            canvas[:, part] = torch.where(chosen, tokens, canvas[:, part])
            when.masked_fill_(chosen, step)
            masked &= ~chosen
        return when

    @property
    def _layers(self) -> int:
        return self.network.config.num_hidden_layers

    def _states(self, canvas: Tensor, layout: Layout, part: slice, cache: CanvasCache | None, whole: bool) -> Tensor:
        """Return the hidden states of a block, "b block h"; without a cache, or if `whole`, of a whole forward."""
        if cache is None:
            return layout.states(self.network, canvas)[:, part]
        stop = part.stop if self.reuse == "blocks" else canvas.shape[1]
        columns = slice(0, canvas.shape[1]) if whole else slice(part.start, stop)
        cache.first = columns.start
        options = {"past_key_values": cache, "use_cache": True}
        states = layout.states(self.network, canvas[:, columns], columns.start, **options)
        return states[:, part.start - columns.start : part.stop - columns.start]

    def _draw(self, states: Tensor, noise: list[torch.Generator]) -> tuple[Tensor, Tensor]:
        """Return a token for every position of the block, and how sure the model is of it, both "b block"."""
        tokens, sure = [], []
        greedy = self.sampling.temperature == 0
        words = self.network.config.vocab_size
        share = max(1, CHUNK_ELEMENTS.get(self.device.type, CHUNK_ELEMENTS["cpu"]) // (self.block * words))
        for begin in range(0, len(states), share):
            logits = self.head.logits(states[begin : begin + share]).float()
            logits[..., self.mask_token] = float("-inf")
            uniform, allowed = None, logits
            if not greedy:
                shape = (self.block, logits.shape[-1])
                options: dict[str, Any] = {"dtype": torch.float64, "device": self.device}
                some = noise[begin : begin + share]
                uniform = torch.stack([torch.rand(shape, generator=one, **options) for one in some])
                if self.sampling.truncated:
                    scores = (logits / self.sampling.temperature).flatten(0, 1)
                    kept = truncate(scores, self.sampling.top_k, self.sampling.top_p).view_as(logits)
                    allowed = logits.masked_fill(kept == float("-inf"), float("-inf"))
            chosen = gumbel_argmax(allowed, uniform, self.sampling.temperature)
            tokens.append(chosen)
            sure.append(confidence(logits, chosen))
        return torch.cat(tokens), torch.cat(sure)
