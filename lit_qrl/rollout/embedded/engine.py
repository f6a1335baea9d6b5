"""The embedded engine: the sampler as Hugging Face modules in this process, on the CPU or the learner's GPU."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_qrl.errors import ConfigError
from lit_qrl.network.head import SamplerHead
from lit_qrl.network.invariant import batch_invariant, check_invariant
from lit_qrl.network.memory import free_memory
from lit_qrl.network.structure import ATTENTION_KINDS, body, states
from lit_qrl.receipts.ledger import PublishReport, ReceivedLedger
from lit_qrl.rollout.embedded.cache import SlotCache
from lit_qrl.rollout.embedded.cache_scales import CacheDtype, CacheScales
from lit_qrl.rollout.embedded.decode import Decoder, Drawn, Piece, Random, plan
from lit_qrl.rollout.embedded.flight import flight_of
from lit_qrl.rollout.embedded.held import Held, grouped
from lit_qrl.rollout.embedded.loading import Modules
from lit_qrl.rollout.embedded.replay import SLOTS, CudaGraphs, Replay
from lit_qrl.rollout.embedded.sampler import EmbeddedSampler, computed
from lit_qrl.rollout.embedded.sampling import check_sampling, uniforms
from lit_qrl.rollout.embedded.scoring import scores_of
from lit_qrl.rollout.engine import Dialogue, EnginePolicy, Finished, Progress, SamplerSpec, Turn
from lit_qrl.rollout.graphs import Trust
from lit_qrl.types import Completion, SamplingParams

"""What a config calls layers whose only state are keys and values."""
CPU_CACHE_BYTES = 2**29
"""Key-value cache on a CPU, 0.5 GB: a quarter of the memory that the smallest supported run may take."""
GPU_CACHE_SHARE = 0.5
"""Share of the free GPU memory for the cache, with what torch holds unused; the rest is for logits and update."""


class TransformersEngine(EmbeddedSampler):
    """Decodes with the Hugging Face modules themselves; needs nothing beyond the base install.

    The sampler has modules of its own. Weights that are published as they are (no format, no noise) are not copied:
    the sampler then holds the learner's very tensors, so that there is one copy in memory. A format whose GEMM the
    device lacks is emulated, with the same numbers at the speed of fp32.

    Args:
        max_batch: sequences decoded at once; None takes what the cache's memory allows. Where memory runs out all the
            same, the batch is halved until it fits.
        cache_gigabytes: memory of the key-value cache; None is 0.5 GB on a CPU and half the free memory of a GPU.
        dtype: what unquantized tensors are cast to; `auto` keeps them as they are published.
        share: `auto` holds the learner's own tensors where nothing was changed, `never` copies; `never` is needed
            when weights are updated more often than published.
        keep_operands: let quantized layers keep their dequantized weights between calls: faster, more memory.
        batch_invariant: compute every token alike in every batch, here and in the learner, so that their log-probs
            are equal to the last bit; slower.
        cuda_graphs: decode in steps of fixed shapes, which a GPU replays as one graph each, and refill ended rows as
            others go on; `auto` does so on a GPU. Conversations, `batch_invariant`, mixtures of experts, layers with a
            window, and rollouts that record experts or kept words are decoded without.
        kv_cache_dtype: `auto` keeps keys and values in the model's dtype, `fp8` rounds those of rollouts to E4M3, as
            `VLLMEngine` does, at scales that are taken anew after each publish: the numbers of an FP8 cache, not its
            memory. Evaluations keep them as they are.
    """

    def __init__(
        self,
        max_batch: int | None = None,
        cache_gigabytes: float | None = None,
        dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
        share: Literal["auto", "never"] = "auto",
        keep_operands: bool = True,
        batch_invariant: bool = False,
        cuda_graphs: CudaGraphs = "auto",
        kv_cache_dtype: CacheDtype = "auto",
    ) -> None:
        super().__init__(max_batch, dtype, share, keep_operands)
        if cache_gigabytes is not None and cache_gigabytes <= 0:
            raise ConfigError("engine.cache_gigabytes is too small.", expected="above 0", given=cache_gigabytes)
        self.cache_gigabytes = cache_gigabytes
        self.batch_invariant, self._checked = batch_invariant, False
        self.cuda_graphs, self._replay = cuda_graphs, Replay(cuda_graphs)
        self.kv_cache_dtype, self.cache_scales = kv_cache_dtype, CacheScales(kv_cache_dtype)

    def validate(self, spec: SamplerSpec) -> None:
        super().validate(spec)
        self.cache_scales.check(spec, self.batch_invariant)

    def check_model(self, network: nn.Module) -> None:
        """Raise `ConfigError` for a model with layers that carry a state from token to token beside keys and values."""
        if odd := states(network):
            raise ConfigError(
                "TransformersEngine decodes attention layers only, and this model has layers that carry a state.",
                expected=f"layers of {' or '.join(ATTENTION_KINDS)}",
                given=f"{type(network).__name__} with {', '.join(odd)}",
                remedy="Use VLLMEngine for this architecture.",
            )

    records_kept = hands_out = takes_in_flight = True

    def check_routes(self, user: str) -> None:
        """Do nothing: what a model's routers choose is seen as it decodes."""

    def setup(self, spec: SamplerSpec, policy: EnginePolicy) -> None:
        super().setup(spec, policy)
        self._checked = False
        assert self._modules is not None
        records = spec.routes or spec.kept
        self._replay.prepare(self._modules.network, self._modules.device, self.batch_invariant, records)

    def loaded(self, modules: Modules) -> None:
        """Check once for each setup that tokens compute alike in every batch, where they have to."""
        self.cache_scales.forget()
        if not self.batch_invariant or self._checked:
            return
        network: Any = modules.network

        def hidden(tokens: Tensor) -> Tensor:
            return body(network)(input_ids=tokens, use_cache=False).last_hidden_state

        check_invariant(hidden, network.config.get_text_config().vocab_size, modules.device)
        self._checked = True

    def _partial(self, received: ReceivedLedger, start: float) -> PublishReport:
        self.cache_scales.forget()
        return super()._partial(received, start)

    # ----------------------------------------------------------------------------------------------------- generation

    @computed
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
        rollout, sampling = sampling is None, sampling or self.spec.sampling
        kept = self.spec.kept and rollout
        positions = range(len(prompts)) if positions is None else positions
        check_sampling(sampling)
        self._check_prompts(prompts, sampling)
        self._check_current()

        def random(prompt: int, steps: int) -> Tensor:
            return uniforms(seed, positions[prompt], n, steps)

        room = self._cache_tokens()
        flight = flight_of(self, self.spec.in_flight)
        rounding = self.cache_scales.of(self.network, prompts) if rollout else None
        decoder = Decoder(self.network, sampling, self.spec.head_dtype, self.spec.routes, kept, flight, rounding)
        if self._replay.possible and not (kept or self.spec.routes):
            results: list[Completion | None] = [None] * (len(prompts) * n)
            most = min(room // (max(map(len, prompts)) + sampling.max_tokens), self.max_batch or SLOTS)
            report = progress or (lambda finished, tokens: None)
            gone = None if finished is None else partial(_hand, finished, self.version)
            pieces, drawn = self._replay.draw(decoder, prompts, n, most, random, report, self._shortage, gone)
            self._collect(drawn, pieces, n, results)
            if finished is not None:
                finished({number: one for number, one in enumerate(results) if one is not None})
            return results  # pyright: ignore[reportReturnType]
        batches = self._plan(prompts, n, sampling.max_tokens, room)
        return self._draw(decoder, prompts, n, batches, random, progress, finished=finished)

    @computed
    def converse(self, dialogue: Dialogue, sampling: SamplingParams | None = None) -> None:
        """Draw every turn of a dialogue, those that wait at a time in one call.

        Keys and values stay from turn to turn where they fit, so that of a conversation the new tokens alone are
        computed; not in a batch-invariant run, whose rounding must not depend on the turns, nor where experts are
        recorded, of every token.
        """
        rollout, sampling = sampling is None, sampling or self.spec.sampling
        kept = self.spec.kept and rollout
        held = Held(self._cache_tokens(), keeps=not (self.batch_invariant or self.spec.routes))
        while dialogue.open:
            turns = dialogue.waiting("all")
            if not turns:
                continue
            # Sequences of a group share the prefill of their first turn.
            turns, n = grouped(turns)
            params = replace(sampling, max_tokens=max(turn.max_tokens for turn in turns))
            check_sampling(params)
            prompts = [turn.tokens for turn in turns[::n]]
            self._check_prompts(prompts, params)
            self._check_current()

            def random(prompt: int, steps: int, turns: list[Turn] = turns, n: int = n) -> Tensor:
                asked = turns[prompt * n : (prompt + 1) * n]
                return torch.cat([uniforms(turn.seed, 0, 1, steps) for turn in asked])

            batches = list(self._plan(prompts, n, params.max_tokens, held.room))
            held.make_room(dialogue, batches, params.max_tokens)
            batches = [held.in_order(pieces, turns, n) for pieces in batches]
            rounding = self.cache_scales.of(self.network, prompts) if rollout else None
            decoder = Decoder(self.network, params, self.spec.head_dtype, self.spec.routes, kept, rounding=rounding)
            drawn = self._draw(decoder, prompts, n, batches, random, None, (held, turns))
            for turn, completion in zip(turns, drawn, strict=True):
                dialogue.answered(turn, completion.cut(turn.max_tokens))

    def _plan(self, prompts: Sequence[Sequence[int]], n: int, steps: int, room: int) -> Iterator[list[Piece]]:
        return plan([len(prompt) for prompt in prompts], n, steps, room, self.max_batch, not self.batch_invariant)

    def _draw(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        n: int,
        batches: Iterable[list[Piece]],
        random: Random,
        progress: Progress | None,
        kept: tuple[Held, list[Turn]] | None = None,
        finished: Finished | None = None,
    ) -> list[Completion]:
        results: list[Completion | None] = [None] * (len(prompts) * n)
        done = tokens = 0

        def report(ended: int, drawn: int) -> None:
            if progress is not None:
                progress(done + ended, tokens + drawn)

        def draw(part: list[Piece]) -> Drawn:
            with batch_invariant(self.batch_invariant):
                if kept is None:
                    ended = None if finished is None else partial(_hand_some, finished, self.version, _numbers(part, n))
                    return decoder.run(prompts, part, random, report, ended=ended)
                held, turns = kept
                try:
                    return decoder.run(prompts, part, random, report, held.of(turns, n), held.whole)
                except (RuntimeError, MemoryError):
                    held.drop()
                    raise

        for batch in batches:
            longest = max(piece.length for piece in batch) + decoder.sampling.max_tokens
            for pieces, drawn in self._shortage.halving(batch, longest, draw):
                tokens += self._collect(drawn, pieces, n, results)
                done += len(drawn.tokens)
                if finished is not None:
                    finished({number: one for number in _numbers(pieces, n) if (one := results[number]) is not None})
                if kept is not None:
                    kept[0].keep(kept[1], n, pieces, drawn)
        return results  # pyright: ignore[reportReturnType]

    def _collect(self, drawn: Drawn, pieces: list[Piece], n: int, results: list[Completion | None]) -> int:
        length, stopped = drawn.length.tolist(), drawn.stopped.tolist()
        tokens, logprobs = drawn.tokens.tolist(), drawn.logprobs.tolist()
        routes = None if drawn.routes is None else drawn.routes.cpu()
        kept: list[list[Tensor]] | None = None
        if drawn.kept is not None:
            counts = drawn.kept[1].tolist()
            ids = iter(drawn.kept[0].cpu().split([count for row in counts for count in row]))
            kept = [[next(ids) for _ in row] for row in counts]
        versions = None if drawn.versions is None else drawn.versions.tolist()
        width, row = max(piece.length for piece in pieces), 0
        for piece in pieces:
            for index in range(piece.first, piece.first + piece.count):
                results[piece.prompt * n + index] = Completion(
                    token_ids=tokens[row][: length[row]],
                    logprobs=logprobs[row][: length[row]],
                    finish_reason="stop" if stopped[row] else "length",
                    version=self.version if versions is None else versions[row][0],
                    versions=None if versions is None else versions[row][: length[row]],
                    routed_experts=None if routes is None else routes[row, width - piece.length : width + length[row]],
                    kept=None if kept is None else kept[row][: length[row]],
                )
                row += 1
        return sum(length)

    def _cache_tokens(self) -> int:
        """Return how many tokens of one sequence fit into the cache's memory."""
        return _tokens_in(self.network, self.cache_gigabytes, self.computes)

    def close(self) -> None:
        super().close()
        self._replay.trust = Trust()  # the last graph keeps memory

    @computed
    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the sampler's log-probs (fp32, T = 1, "length − 1") of each sequence's tokens after the first."""
        self._check_current()
        network, rounding = self.network, self.cache_scales.of(self.network, sequences, keep=False)
        head = SamplerHead.of(network, self.spec.head_dtype)
        return scores_of(network, head, sequences, self.batch_invariant, rounding)


def _numbers(pieces: Sequence[Piece], n: int) -> list[int]:
    """Return the numbers of a batch's rows among the completions of all prompts."""
    return [piece.prompt * n + i for piece in pieces for i in range(piece.first, piece.first + piece.count)]


def _hand(finished: Finished, version: int, numbers: Sequence[int], drawn: Drawn) -> None:
    """Give away completions that have ended while others go on.

    Args:
        finished: takes them.
        version: of the weights.
        numbers: theirs.
        drawn: of them.
    """
    lengths, stopped = drawn.length.tolist(), drawn.stopped.tolist()
    finished(
        {
            number: Completion(
                token_ids=drawn.tokens[row, : lengths[row]].tolist(),
                logprobs=drawn.logprobs[row, : lengths[row]].tolist(),
                finish_reason="stop" if stopped[row] else "length",
                version=version,
            )
            for row, number in enumerate(numbers)
        }
    )


def _hand_some(finished: Finished, version: int, numbers: Sequence[int], drawn: Drawn, rows: Tensor) -> None:
    """Give away some rows of a batch that goes on."""
    some = Drawn(drawn.tokens[rows], drawn.logprobs[rows], drawn.length[rows], drawn.stopped[rows])
    _hand(finished, version, [numbers[row] for row in rows.tolist()], some)


def _tokens_in(network: Any, gigabytes: float | None, dtype: torch.dtype | None) -> int:
    weight = network.get_input_embeddings().weight
    if gigabytes is not None:
        room = int(gigabytes * 1e9)
    elif weight.device.type == "cuda":
        room = int(free_memory(weight.device) * GPU_CACHE_SHARE)
    else:
        room = CPU_CACHE_BYTES
    return room // SlotCache.bytes_per_token(network.config, dtype or weight.dtype)
