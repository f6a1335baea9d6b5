"""The embedded engine: the sampler as Hugging Face modules in this process, on the CPU or the learner's GPU."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_qrl.errors import ConfigError, check_choice
from lit_qrl.formats.kernels import dispatch
from lit_qrl.network.invariant import batch_invariant, check_invariant
from lit_qrl.network.memory import free_memory
from lit_qrl.network.routing import routers
from lit_qrl.network.structure import ATTENTION_KINDS, PLAIN_ATTENTION, body, cached_numbers, states
from lit_qrl.precision.layers.one_pass import take_one_pass
from lit_qrl.precision.layers.residual import join_residuals
from lit_qrl.receipts.ledger import PublishReport, ReceivedLedger
from lit_qrl.rollout.embedded.attention import FOLDED, take_norms
from lit_qrl.rollout.embedded.cache import MARGIN, CacheDtype, HeldRow, SlotCache, scales_of
from lit_qrl.rollout.embedded.decode import Decoder, Drawn, Random, plan, windowed
from lit_qrl.rollout.embedded.loading import Modules
from lit_qrl.rollout.embedded.sampler import UNLIMITED, EmbeddedSampler, computed
from lit_qrl.rollout.embedded.sampling import uniforms
from lit_qrl.rollout.engine import Dialogue, EnginePolicy, Finished, Progress, SamplerSpec, Turn
from lit_qrl.rollout.graphs import Trust
from lit_qrl.types import Completion, SamplingParams

log = logging.getLogger(__name__)

CudaGraphs = bool | Literal["auto"]
SLOTS = 512
"""Most rows at once where `max_batch` does not say: more hardly raise the speed, and take memory for their logits."""

WORD_BYTES = 16
"""Of each row and word while a token is drawn: logits, scores, their exponentials and running sums."""
CPU_CACHE_BYTES = 2**29
"""Key-value cache on a CPU, 0.5 GB: a quarter of the memory that the smallest supported run may take."""
GPU_CACHE_SHARE = 0.5
"""Share of the free GPU memory for the cache, with what torch holds unused; the rest is for logits and update."""


class TransformersEngine(EmbeddedSampler):
    """Decodes with the Hugging Face modules themselves; needs nothing beyond the base install.

    The sampler has modules of its own. Weights that are published as they are (no format, no noise) are not copied:
    the sampler then holds the learner's very tensors, so that there is one copy in memory; on a GPU those of queries,
    keys and values, 5 to 10 % of a model, are laid together for one product. A format whose GEMM the device lacks is
    emulated, with the same numbers at the speed of fp32.

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
        kv_cache_dtype: `auto` keeps keys and values in the model's dtype, `fp8` rounds those of rollouts to E4M3, at
            scales that are taken anew after each publish: the numbers of an FP8 cache, not its memory. Evaluations keep
            them as they are.
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
        self.cuda_graphs: CudaGraphs = cuda_graphs
        self.trust, self.continuous = Trust(), False
        check_choice("data.engine.kv_cache_dtype", kv_cache_dtype, ("auto", "fp8"))
        self.kv_cache_dtype, self._scales = kv_cache_dtype, None

    def validate(self, spec: SamplerSpec) -> None:
        super().validate(spec)
        if self.kv_cache_dtype == "fp8" and self.batch_invariant:
            raise ConfigError(
                "An FP8 KV cache cannot be had beside data.engine.batch_invariant.",
                expected="data.engine.kv_cache_dtype: auto",
                given="fp8",
                remedy="batch_invariant needs a learner that attends to the sampler's keys and values. Leave one of "
                "the two out.",
            )

    def check_model(self, network: nn.Module) -> None:
        """Raise `ConfigError` for a model with layers that carry a state from token to token beside keys and values."""
        if odd := states(network):
            raise ConfigError(
                "TransformersEngine decodes attention layers only, and this model has layers that carry a state.",
                expected=f"layers of {' or '.join(ATTENTION_KINDS)}",
                given=f"{type(network).__name__} with {', '.join(odd)}",
                remedy="Use VLLMEngine for this architecture.",
            )

    records_kept = hands_out = True
    cache_margin: float = MARGIN
    """How much larger than those that were seen a key or value in an FP8 cache may be."""

    def check_routes(self, user: str) -> None:
        """Do nothing: what a model's routers choose is seen as it decodes."""

    def setup(self, spec: SamplerSpec, policy: EnginePolicy) -> None:
        """Build the sampler's modules, and see whether they batch continuously; what keeps them from it is logged."""
        super().setup(spec, policy)
        self._checked, self.trust, self.continuous = False, Trust(), False
        assert self._modules is not None
        network, on_gpu = self._modules.network, self._modules.device.type == "cuda"
        if not self.cuda_graphs or (self.cuda_graphs == "auto" and not on_gpu):
            return
        why = "batch_invariant is on" if self.batch_invariant else unfit(network)
        if why is not None:
            level = logging.INFO if self.cuda_graphs == "auto" else logging.WARNING
            log.log(level, "The embedded engine decodes without CUDA graphs: %s.", why)
            return
        self.continuous = True
        if spec.routes or spec.kept:
            log.info("Rollouts are decoded without CUDA graphs: what each token was drawn among is recorded.")
        if on_gpu:
            take_one_pass(network)
            take_norms(network)
            join_residuals(network, across=True)
            self._modules.joins = dispatch.triton_installed("joined")

    def loaded(self, modules: Modules) -> None:
        """Check once for each setup that tokens compute alike in every batch, where they have to."""
        self._scales = None
        if not self.batch_invariant or self._checked:
            return
        network: Any = modules.network

        def hidden(tokens: Tensor) -> Tensor:
            return body(network)(input_ids=tokens, use_cache=False).last_hidden_state

        check_invariant(hidden, network.config.get_text_config().vocab_size, modules.device)
        self._checked = True

    def _partial(self, received: ReceivedLedger) -> PublishReport:
        self._scales = None
        return super()._partial(received)

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
        positions, room = range(len(prompts)) if positions is None else positions, self._cache_tokens()
        recorded = self.spec.routes or (self.spec.kept and sampling is None)
        trust = self.trust if self.continuous and not recorded else None
        decoder = self._decoder(prompts, sampling or self.spec.sampling, sampling is None, trust)

        def random(prompt: int, steps: int) -> Tensor:
            return uniforms(seed, positions[prompt], n, steps)

        steps, most = decoder.steps, None
        if trust is None:
            batches = self._plan(prompts, n, steps, room)
        else:
            batches = plan([len(prompt) for prompt in prompts], n, 0, UNLIMITED, None)
            most = max(1, min(room // (max(map(len, prompts)) + steps), self.max_batch or SLOTS))
        return self._draw(decoder, prompts, n, batches, random, TurnCache(0, False), progress, finished, most)

    @computed
    def converse(self, dialogue: Dialogue, sampling: SamplingParams | None = None) -> None:
        """Draw every turn of a dialogue, those that wait at a time in one call.

        Keys and values stay from turn to turn where they fit, so that of a conversation the new tokens alone are
        computed; not in a batch-invariant run, whose rounding must not depend on the turns, nor where experts are
        recorded, of every token.
        """
        held = TurnCache(self._cache_tokens(), keeps=not (self.batch_invariant or self.spec.routes))
        while dialogue.open:
            turns = dialogue.waiting("all")
            if not turns:
                continue
            # Sequences of a group share the prefill of their first turn.
            turns, n = grouped(turns)
            prompts = [turn.tokens for turn in turns[::n]]
            params = replace(sampling or self.spec.sampling, max_tokens=max(turn.max_tokens for turn in turns))
            decoder = self._decoder(prompts, params, sampling is None)

            def random(prompt: int, steps: int, turns: list[Turn] = turns, n: int = n) -> Tensor:
                asked = turns[prompt * n : (prompt + 1) * n]
                return torch.cat([uniforms(turn.seed, 0, 1, steps) for turn in asked])

            batches = self._plan(prompts, n, decoder.steps, held.room)
            batches = held.begin(dialogue, turns, n, list(batches), decoder.steps)
            drawn = self._draw(decoder, prompts, n, batches, random, held)
            for turn, completion in zip(turns, drawn, strict=True):
                dialogue.answered(turn, completion.cut(turn.max_tokens))

    def _decoder(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, rollout: bool, trust: Trust | None = None
    ) -> Decoder:
        self._check(prompts, sampling)
        scales = None
        if rollout:
            scales = self._scales = self.cache_scales(prompts)
        kept = self.spec.kept and rollout
        return Decoder(self.network, sampling, self.spec.head_dtype, self.spec.routes, kept, scales, trust)

    def _plan(self, prompts: Sequence[Sequence[int]], n: int, steps: int, room: int) -> Iterator[list[int]]:
        return plan([len(prompt) for prompt in prompts], n, steps, room, self.max_batch, not self.batch_invariant)

    def _draw(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        n: int,
        batches: Iterable[list[int]],
        random: Random,
        held: "TurnCache",
        progress: Progress | None = None,
        finished: Finished | None = None,
        most: int | None = None,
    ) -> list[Completion]:
        def draw(report: Progress, part: list[int], most: int) -> Drawn:
            version = self.version

            def gone(ended: Sequence[int], drawn: Drawn) -> None:
                if finished is not None:
                    finished(dict(zip([part[row] for row in ended], drawn.completions(version), strict=True)))

            away = None if finished is None else gone
            try:
                with batch_invariant(self.batch_invariant):
                    return decoder.run(prompts, n, part, random, report, most, held.beginnings, held.whole, away)
            except (RuntimeError, MemoryError):
                self.trust.former = None
                decoder.forget()
                held.drop()
                raise

        def read(part: list[int], drawn: Drawn) -> list[Completion]:
            held.keep(part, drawn)
            return drawn.completions(self.version)

        return self._in_batches(prompts, n, batches, decoder.steps, draw, read, progress, finished, most)

    def _cache_tokens(self) -> int:
        """Return how many tokens of one sequence fit into the cache's memory."""
        weight = self.network.get_input_embeddings().weight
        if self.cache_gigabytes is not None:
            room = int(self.cache_gigabytes * 1e9)
        elif weight.device.type == "cuda":
            room = int(free_memory(weight.device) * GPU_CACHE_SHARE)
        else:
            room = CPU_CACHE_BYTES
        return room // (cached_numbers(self.network.config) * (self.computes or weight.dtype).itemsize)

    def close(self) -> None:
        super().close()
        self.trust = Trust()  # the last graph keeps memory

    def cache_scales(self, sequences: Sequence[Sequence[int]]) -> Tensor | None:
        """Return the scales of an FP8 cache: those of the first rollout since the weights came, else of `sequences`."""
        if self.kv_cache_dtype == "auto" or self._scales is not None:
            return self._scales
        return scales_of(self.network, sequences, self.cache_margin)


def unfit(network: Any) -> str | None:
    """Return why a model does not decode in slots, or None.

    Args:
        network: the sampler's Hugging Face model.
    """
    config = network.config
    if config.model_type not in PLAIN_ATTENTION:
        return f"{config.model_type} models are not known to attend over their whole past alone"
    if config._attn_implementation != FOLDED:
        return f"its attention is {config._attn_implementation}"
    if windowed(config):
        return "some of its layers have a window"
    if routers(network):
        return "its experts are chosen token by token"
    turned = {getattr(part, "rope_type", None) for part in network.modules()} & {"dynamic", "longrope"}
    return f"its rotary embedding is {turned.pop()}, which depends on the batch" if turned else None


class TurnCache:
    """What is kept of the conversations of one dialogue; whatever does not fit is computed anew.

    Args:
        room: tokens of one sequence that fit into memory, in all caches together.
        keeps: False computes everything anew.
    """

    def __init__(self, room: int, keeps: bool = True) -> None:
        self.room, self.keeps = room, keeps
        self.rows: dict[int, HeldRow] = {}
        self.turns: Sequence[Turn] = ()
        self.n, self.whole = 1, False

    @property
    def tokens(self) -> int:
        """Tokens for which the caches that are kept have memory."""
        caches: dict[int, SlotCache] = {id(row.cache): row.cache for row in self.rows.values()}
        return sum(cache.capacity * cache.columns for cache in caches.values())

    @property
    def beginnings(self) -> dict[int, HeldRow]:
        """What is held of the call's prompts, by their position."""
        found = ((i // self.n, self.rows.get(turn.index)) for i, turn in enumerate(self.turns))
        return {prompt: row for prompt, row in found if row is not None}

    def drop(self) -> None:
        """Forget all of it, and keep nothing of the batch that is being drawn."""
        self.rows, self.whole = {}, False

    def begin(
        self, dialogue: Dialogue, turns: Sequence[Turn], n: int, batches: list[list[int]], steps: int
    ) -> list[list[int]]:
        """Forget what has ended, and everything where the next batches do not fit beside it.

        Several batches do not fit together, so that nothing of them is kept.

        Args:
            dialogue: knows what has ended.
            turns: of the next call, `n` for each prompt.
            n: completions of each prompt.
            batches: of the call.
            steps: limit of its completions.

        Returns:
            The batches, in each of which those stand together of which as many tokens are new.
        """
        self.turns, self.n, self.whole = turns, n, self.keeps and len(batches) == 1
        self.rows = {index: row for index, row in self.rows.items() if not dialogue.has_ended(index)}
        wanted = max(len(rows) * (len(turns[rows[0]].tokens) + steps) for rows in batches)
        if self.tokens + wanted > self.room:
            self.rows = {}
        held = {prompt: row.shared(turns[prompt * n].tokens) for prompt, row in self.beginnings.items()}
        return [sorted(rows, key=lambda row: held.get(row // n, 0) - len(turns[row].tokens)) for rows in batches]

    def keep(self, part: Sequence[int], drawn: Drawn) -> None:
        """Keep what a batch has left in its cache.

        Args:
            part: the numbers of the batch.
            drawn: their tokens, and the cache.
        """
        if drawn.cache is None:
            return
        rows = zip(part, drawn.places, drawn.tokens.tolist(), drawn.length.tolist(), strict=True)
        for number, place, tokens, length in rows:
            turn = self.turns[number]
            start = drawn.width - len(turn.tokens)
            self.rows[turn.index] = HeldRow(drawn.cache, place, start, [*turn.tokens, *tokens[: length - 1]])


def grouped(turns: Sequence[Turn]) -> tuple[list[Turn], int]:
    """Return turns so ordered that those with the same tokens stand together, and how many of each there are.

    Where their numbers differ, each counts for itself.

    >>> turns = [Turn(index=i, tokens=[token], max_tokens=4, seed=i) for i, token in enumerate([7, 8, 7, 8])]
    >>> [turn.index for turn in grouped(turns)[0]], grouped(turns)[1]
    ([0, 2, 1, 3], 2)
    """
    same: dict[tuple[int, ...], list[Turn]] = {}
    for turn in turns:
        same.setdefault(tuple(turn.tokens), []).append(turn)
    n = min(map(len, same.values())) if len({len(equal) for equal in same.values()}) == 1 else 1
    return [turn for equal in same.values() for turn in equal], n
