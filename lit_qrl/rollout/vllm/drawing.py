"""The part of a vLLM engine that draws: completions, conversations, and the log-probs of given sequences."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from lit_qrl.errors import ConfigError
from lit_qrl.network.structure import check_tokens
from lit_qrl.rollout.engine import Dialogue, EngineDiedError, Finished, Progress, SamplerSpec, Turn
from lit_qrl.rollout.vllm import cache_scales, requests
from lit_qrl.rollout.vllm.flight import Flight, unfinished
from lit_qrl.rollout.vllm.parallel import joined, shown
from lit_qrl.rollout.vllm.process import kept_process_state
from lit_qrl.rollout.vllm.watchdog import Watchdog
from lit_qrl.types import Completion, SamplingParams


class Drawing:
    """The part of `VLLMEngine` that sends requests; the engine itself builds, publishes and sleeps."""

    spec: SamplerSpec
    version: int
    llm: Any
    policy: Any
    request_seeds: bool
    processes: Any = None
    routed: requests.Routed | None
    _adapter_active: bool
    live: Any
    cache_dtype: str
    _usable: bool
    _poisoned: bool
    _scales_due: bool
    _flight: Flight | None = None

    def _awake(self, complete: bool = False) -> Any:
        raise NotImplementedError

    def longest(self) -> int:
        raise NotImplementedError

    def _reset_caches(self) -> bool:
        raise NotImplementedError

    def _watchdog(self, what: str, timeout: float | None = None) -> Watchdog:
        raise NotImplementedError

    def check_repeatable(self) -> None:
        """Raise `ConfigError` where a request draws from the engine's own generator, as far as others left it."""
        if not self.request_seeds:
            raise ConfigError(
                "trainer.deterministic asks for the same bits in every run, and requests without seeds of their own "
                "draw from the engine's generator, in the order in which vLLM comes to them.",
                expected="data.engine.request_seeds: true",
                given="false",
            )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        seed: int,
        progress: Progress | None = None,
        sampling: SamplingParams | None = None,
        positions: Sequence[int] | None = None,
        finished: Finished | None = None,
    ) -> list[Completion]:
        """Return `n` completions of each prompt, prompt-major; `finished` is called after steps in which some ended.

        Raises:
            EngineDiedError: when vLLM fails or a step takes longer than `step_timeout`.
        """
        self._awake(complete=True)
        self._calibrate(prompts)
        kept, drawn_with = self.spec.kept and sampling is None, sampling or self.spec.sampling
        number = range(len(prompts)) if positions is None else positions
        prompts, number, own = joined(prompts, number, (n, seed, drawn_with), self.processes)
        order = requests.by_length(prompts, n)
        rows = [(number[i // n], i % n) for i in order]
        params = requests.drawings(drawn_with, rows, seed if self.request_seeds else None, kept)
        with kept_process_state(None if self.request_seeds else seed):
            if self._flight is not None:
                self._flight.begin()
            handed = None if finished is None else partial(self._hand, finished, order, kept, own, n)
            told = shown(progress, own, len(prompts))
            outputs = self._run([prompts[i // n] for i in order], params, told, handed)
        drawn = {i: self._read(output, kept) for i, output in zip(order, outputs, strict=True)}
        self._poisoned |= not all(math.isfinite(value) for one in drawn.values() for value in one.logprobs)
        return [drawn[i] for i in range(own.start * n, own.stop * n)]

    def _hand(
        self, finished: Finished, order: Sequence[int], kept: bool, own: slice, n: int, outputs: Mapping[int, Any]
    ) -> None:
        first, last = own.start * n, own.stop * n  # of other processes of this engine are the rest
        read = {order[position]: output for position, output in outputs.items()}
        finished({i - first: self._read(output, kept) for i, output in read.items() if first <= i < last})

    def converse(self, dialogue: Dialogue, sampling: SamplingParams | None = None) -> None:
        """Draw every turn of a dialogue as soon as it is there, beside those that are being drawn.

        Raises:
            EngineDiedError: as `generate` does.
        """
        self._awake(complete=True)
        kept, drawn_with = self.spec.kept and sampling is None, sampling or self.spec.sampling

        def draw(turn: Turn) -> Any:
            seed = requests.request_seed(turn.seed, 0, 0) if self.request_seeds else None
            return requests.drawing(replace(drawn_with, max_tokens=turn.max_tokens), seed, kept)

        begun: list[Turn] = []
        while self._scales_due and dialogue.open and not begun:
            begun = dialogue.waiting("all")  # so that the scales hang on no thread's luck
        self._calibrate([turn.tokens for turn in begun])
        with kept_process_state(), self._sampling():
            watch = self._watchdog("one step")
            read = partial(self._read, kept=kept)
            finite = requests.converse(self.llm, dialogue, draw, read, self._adapter_active, watch, begun)
        self._poisoned |= not finite

    def _read(self, output: Any, kept: bool) -> Completion:
        return requests.completion(output, self.version, self.routed, kept, self._flight)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the sampler's log-probs (fp32, T = 1, "length − 1") of each sequence's tokens after the first."""
        self._awake(complete=True)
        due = self._scales_due
        self._calibrate(sequences)
        self._scales_due = due  # what is drawn takes scales of its own prompts, whether a probe came before or not
        with kept_process_state():
            outputs = self._run(sequences, [requests.scoring() for _ in sequences], None)
        scores = [requests.scores(output, tokens) for output, tokens in zip(outputs, sequences, strict=True)]
        self._poisoned |= not all(bool(values.isfinite().all()) for values in scores)
        return scores

    def _calibrate(self, sequences: Sequence[Sequence[int]]) -> None:
        """Give an FP8 KV cache scales for new weights, of what they make of the sequences that are asked for first."""
        if not self._scales_due or not sequences:
            return
        shown = sequences[: cache_scales.SEQUENCES]
        with kept_process_state(), cache_scales.observed(self.live.model) as largest:
            self._run(shown, [requests.scoring() for _ in shown], None)
        cache_scales.set_scales(self.live.model, largest, self.cache_dtype)
        self._scales_due = False
        self._reset_caches()

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        params: list[Any],
        progress: Progress | None,
        taken: Callable[[Mapping[int, Any]], None] | None = None,
    ) -> list[Any]:
        requests.check_lengths(prompts, params, self.longest())
        check_tokens(self.policy.network.config, prompts)
        with self._sampling():
            watch = self._watchdog("one step")
            return requests.run(self.llm, prompts, params, self._adapter_active, progress, watch, taken, self._flight)

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """Draw from a cache that is sound; an engine that dies of it cannot be used."""
        late = self._flight is not None and self._flight.stale and not unfinished(self.llm)
        # It woke, drew NaN, or kept what weights in flight made old, and no publish came since.
        if (self._poisoned or late) and self._reset_caches() and self._flight is not None:
            self._flight.stale = False
        try:
            yield
        except EngineDiedError:
            self._usable = False
            raise
