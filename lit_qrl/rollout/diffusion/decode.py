"""Semi-autoregressive denoising of a batch: blocks from left to right, in each step the surest tokens of the block."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from lit_qrl.functional.diffusion import blocks_of, confidence, gumbel_argmax, most_confident
from lit_qrl.functional.logprobs import CHUNK_ELEMENTS
from lit_qrl.network.denoising import Layout
from lit_qrl.network.head import SamplerHead
from lit_qrl.network.structure import cached
from lit_qrl.rollout.diffusion.stack import Angles, CanvasCache, Stack
from lit_qrl.rollout.embedded.decode import Drawn
from lit_qrl.rollout.embedded.sampling import truncate
from lit_qrl.rollout.graphs import Trust, recorded
from lit_qrl.types import SamplingParams

Reuse = Literal["none", "prompt", "blocks"]
RowSeed = Callable[[int, int], int]
"""Gives the seed of a completion's noise, by the prompt's position and the completion's number among the prompt's."""


def fill(uniform: Tensor, noise: list[torch.Generator]) -> None:
    """Draw noise "b block v" in place, of each row by its own generator."""
    for row, generator in enumerate(noise):
        torch.rand(uniform.shape[1:], generator=generator, out=uniform[row])


@dataclass(slots=True, kw_only=True)
class Denoised(Drawn):
    """Completions of one batch; their log-probs are estimated afterwards.

    Args:
        unmasked_at: "b length", the step at which each token was unmasked; −1 for one that never was.
    """

    unmasked_at: Tensor


@dataclass(slots=True, kw_only=True)
class Canvas:
    """A batch that is being denoised, and the block under way; steps write to these tensors in place.

    Args:
        tokens: "b s", prompts and completions.
        layout: of its rows.
        angles: of all columns, where the model's layers are called one by one.
        first: column at which the block under way begins.
        noise: generator of each row.
        columns: " block", of the block under way.
        masked: "b block", which of them are masked.
        when: "b block", the step at which each was unmasked.
        clock: the step under way, a number on the device.
        uniform: "b block v", noise of the step under way; None where decoding is greedy or noise is drawn in parts.
        cache: keys and values of all columns, where some are kept.
        graph: a step that is not a block's first, as it was recorded.
        warm: whether such a step was launched.
    """

    tokens: Tensor
    layout: Layout
    angles: Angles | None
    first: int
    noise: list[torch.Generator]
    columns: Tensor
    masked: Tensor
    when: Tensor
    clock: Tensor
    uniform: Tensor | None
    cache: CanvasCache | None
    graph: torch.cuda.CUDAGraph | None = None
    warm: bool = False

    @property
    def results(self) -> tuple[Tensor, ...]:
        """What a step writes to."""
        return self.tokens, self.masked, self.when, self.clock

    def begin(self, first: int) -> None:
        """Go to the block that begins at column `first`."""
        self.first = first
        self.columns.copy_(torch.arange(first, first + len(self.columns), device=self.columns.device))
        self.masked.fill_(True)
        self.clock.zero_()

    def draw_noise(self) -> None:
        """Draw the noise of a step, of each row by its own generator."""
        if self.uniform is not None:
            fill(self.uniform, self.noise)


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
        graphs: what is known of recorded steps; where it is given, a block's later steps are replayed as one CUDA graph
            on a GPU, if the model's layers are known. None launches every step.
    """

    def __init__(
        self,
        network: Any,
        sampling: SamplingParams,
        block: int,
        steps: int,
        reuse: Reuse = "none",
        head_dtype: torch.dtype | None = None,
        graphs: Trust | None = None,
    ) -> None:
        self.network, self.sampling = network, sampling
        self.block, self.steps, self.reuse = block, steps, reuse
        self.head, self.stack = SamplerHead.of(network, head_dtype), Stack.of(network)
        self.device = network.get_input_embeddings().weight.device
        self.mask_token: int = network.config.mask_token_id
        self.words, self.greedy = network.get_output_embeddings().weight.shape[0], sampling.temperature == 0
        limit = CHUNK_ELEMENTS.get(self.device.type, CHUNK_ELEMENTS["cpu"])
        self.share = max(1, limit // (block * self.words))
        """Rows whose tokens are drawn at once."""
        stops = () if sampling.ignore_stop else sampling.stop_token_ids
        self.stops = torch.tensor(stops, dtype=torch.long, device=self.device)
        self.graphs = graphs if self.stack is not None and self.device.type == "cuda" else None

    # A tensor of inference mode cannot tell that it was not written to, so that layers would not share its codes.
    @torch.no_grad()
    def run(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        numbers: Sequence[int],
        row_seed: RowSeed,
        report: Callable[[int, int], None],
    ) -> Denoised:
        """Return the completions of one batch.

        Args:
            prompts: all prompts of the call.
            n: completions of each.
            numbers: of those of this batch, prompt-major.
            row_seed: of each completion's noise.
            report: called after each block with (sequences ended in this batch, tokens unmasked in this batch).
        """
        place = {prompt: place for place, prompt in enumerate(dict.fromkeys(number // n for number in numbers))}
        given = [prompts[prompt] for prompt in place]
        lengths, mask = list(map(len, given)), [self.mask_token]
        length, width = self.sampling.max_tokens, max(lengths)
        start = torch.tensor([[*mask * (width - len(one)), *one, *mask * length] for one in given])
        owner = torch.tensor([place[number // n] for number in numbers], device=self.device)
        once = Layout.of(lengths, [length] * len(given), width, length, self.device)
        noise = [torch.Generator(self.device).manual_seed(row_seed(*divmod(number, n))) for number in numbers]
        canvas = self._canvas(start.to(self.device)[owner], once.rows(owner), noise)
        b, columns = len(owner), torch.arange(length, device=self.device)
        drawn = Denoised(
            tokens=torch.full((b, length), self.mask_token, device=self.device),
            logprobs=torch.zeros(b, length, dtype=torch.float32, device=self.device),
            length=torch.full((b,), length, device=self.device),
            stopped=torch.zeros(b, dtype=torch.bool, device=self.device),
            unmasked_at=torch.full((b, length), -1, device=self.device),
        )
        rows, total = torch.arange(b, device=self.device), 0
        # The canvases of a prompt's completions are still the same: its first states serve all of them.
        first = None
        if self.reuse == "none":
            shown = torch.arange(width, width + self.block, device=self.device)
            angles = None if self.stack is None else self.stack.angles(once.positions)
            first = self._forward(start.to(self.device), once, angles, shown)
        for number, part in enumerate(blocks_of(length, self.block)):
            states = None if first is None else first[owner]
            first = None
            self._fill(canvas, width + part.start, states)
            drawn.unmasked_at[rows, part] = canvas.when + number * self.steps
            drawn.tokens[rows, part] = canvas.tokens[:, width + part.start : width + part.stop]
            total += len(rows) * self.block
            ends = torch.isin(drawn.tokens[rows], self.stops) & (columns < part.stop)
            over = ends.any(dim=1)
            drawn.stopped[rows] = over
            drawn.length[rows[over]] = ends[over].int().argmax(dim=1) + 1
            live = (~over).nonzero()[:, 0]
            if len(live) < len(rows):
                rows = rows[live]
                some = [canvas.noise[i] for i in live.tolist()]
                canvas = self._canvas(canvas.tokens[live], canvas.layout.rows(live), some)
            last = part.stop == length
            report(b if last else b - len(rows), total)
            if not len(rows):
                break
        return drawn

    def _canvas(self, tokens: Tensor, layout: Layout, noise: list[torch.Generator]) -> Canvas:
        """Return rows with room for what their steps write."""
        b = len(tokens)
        return Canvas(
            tokens=tokens,
            layout=layout,
            angles=None if self.stack is None else self.stack.angles(layout.positions),
            first=0,
            noise=noise,
            columns=torch.zeros(self.block, dtype=torch.long, device=self.device),
            masked=torch.ones(b, self.block, dtype=torch.bool, device=self.device),
            when=torch.zeros(b, self.block, dtype=torch.long, device=self.device),
            clock=torch.zeros((), dtype=torch.long, device=self.device),
            uniform=self.memory(b),
            cache=None if self.reuse == "none" else CanvasCache(self.network.config.num_hidden_layers, tokens.shape[1]),
        )

    def memory(self, rows: int) -> Tensor | None:
        """Return where the noise of a step is written, "b block v"; None where it is drawn in parts, or not at all."""
        if self.greedy or rows > self.share:
            return None
        return torch.empty(rows, self.block, self.words, dtype=torch.float64, device=self.device)

    def _fill(self, canvas: Canvas, first: int, states: Tensor | None) -> None:
        """Unmask the block of the canvas that begins at column `first`.

        Args:
            canvas: of which a block is unmasked in place.
            first: column.
            states: hidden states of the first step, "b block h", where they are known.
        """
        canvas.begin(first)
        former = canvas.graph
        if self.reuse == "prompt":  # whose steps are of other shapes in each block
            canvas.graph, canvas.warm = None, False
        for step in range(self.steps):
            canvas.draw_noise()
            if step == 0:
                self._step(canvas, self._states(canvas, whole=True) if states is None else states)
            elif canvas.graph is not None:
                canvas.graph.replay()
            elif canvas.warm and self._replays(canvas):
                assert self.graphs is not None
                launched = partial(self._launch, canvas)
                canvas.graph = recorded(launched, canvas.results, self.graphs, self.device, former)
            else:  # kernels are made by the first step of its shapes, and a graph is recorded after
                self._launch(canvas)
                canvas.warm = True

    def _replays(self, canvas: Canvas) -> bool:
        """Return whether a step of the canvas may be recorded: its noise is drawn before, for all rows."""
        known = self.graphs is not None and not self.graphs.broken
        return known and (canvas.uniform is not None or self.greedy)

    def _launch(self, canvas: Canvas) -> None:
        """Take a step that is not a block's first."""
        self._step(canvas, self._states(canvas))

    def _step(self, canvas: Canvas, states: Tensor) -> None:
        """Draw a token for every masked position of the block and keep the surest; nothing waits for the device.

        Args:
            canvas: whose noise of this step is drawn.
            states: hidden states "b block h".
        """
        tokens, sure = self.draw(states, canvas.uniform, canvas.noise)
        chosen = most_confident(sure, canvas.masked, self.block // self.steps)
        block = torch.where(chosen, tokens, canvas.tokens.index_select(1, canvas.columns))
        canvas.tokens.index_copy_(1, canvas.columns, block)
        canvas.when.copy_(torch.where(chosen, canvas.clock, canvas.when))
        canvas.masked.logical_and_(~chosen)
        canvas.clock.add_(1)

    def draw(self, states: Tensor, uniform: Tensor | None, noise: list[torch.Generator]) -> tuple[Tensor, Tensor]:
        """Return tokens and confidences "b block"; those of positions that are not masked mean nothing.

        Args:
            states: hidden states "b block h".
            uniform: noise of the step in `memory`, already drawn; None draws what is needed.
            noise: generator of each row.
        """
        tokens, sure = [], []
        for begin in range(0, len(states), self.share):
            rows = slice(begin, begin + self.share)
            logits, given = self.head.logits(states[rows]), uniform
            if given is None and not self.greedy:
                given = torch.empty(logits.shape, dtype=torch.float64, device=self.device)
                fill(given, noise[rows])
            drawn, certainty = self._of(logits, given)
            tokens.append(drawn)
            sure.append(certainty)
        return torch.cat(tokens), torch.cat(sure)

    def _of(self, logits: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = logits.float()
        logits.select(-1, self.mask_token).fill_(float("-inf"))
        allowed = logits
        if self.sampling.truncated and not self.greedy:
            scores = (logits / self.sampling.temperature).flatten(0, 1)
            kept = truncate(scores, self.sampling.top_k, self.sampling.top_p).view_as(logits)
            allowed = logits.masked_fill(kept == float("-inf"), float("-inf"))
        chosen = gumbel_argmax(allowed, uniform, self.sampling.temperature)
        return chosen, confidence(logits, chosen)

    def _states(self, canvas: Canvas, whole: bool = False) -> Tensor:
        """Return the hidden states of the block under way, "b block h", of a `whole` forward or of what is not kept."""
        kept, layout = canvas.cache, canvas.layout
        if kept is None or whole:
            if kept is not None:
                kept.at = None
            return self._forward(canvas.tokens, layout, canvas.angles, canvas.columns, kept)
        kept.at, part = canvas.columns, None
        if self.reuse == "prompt":
            kept.at = torch.arange(canvas.first, kept.columns, device=self.device)
            part = torch.arange(self.block, device=self.device)
        angles = canvas.angles and (
            canvas.angles[0].index_select(1, kept.at),
            canvas.angles[1].index_select(1, kept.at),
        )
        return self._forward(canvas.tokens.index_select(1, kept.at), layout, angles, part, kept)

    def _forward(
        self,
        tokens: Tensor,
        layout: Layout,
        angles: Angles | None,
        part: Tensor | None,
        kept: CanvasCache | None = None,
    ) -> Tensor:
        """Return the last hidden states "b p h".

        Args:
            tokens: "b n", of the columns that are computed.
            layout: of the canvas.
            angles: of those columns.
            part: " p", which of them are read; None for all.
            kept: keys and values of the canvas, with the columns set that are computed.
        """
        if self.stack is not None:
            assert angles is not None
            return self.stack.states(tokens, angles, layout.valid, part, kept)
        states = layout.states(self.network, tokens, None if kept is None else kept.at, **cached(self.network, kept))
        return states if part is None else states.index_select(1, part)
