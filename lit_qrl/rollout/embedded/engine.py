"""The embedded engine: the sampler as Hugging Face modules in this process, on the CPU or the learner's GPU."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_qrl.errors import ConfigError
from lit_qrl.formats.base import NumberFormat
from lit_qrl.formats.support import tell_emulated
from lit_qrl.network.head import SamplerHead
from lit_qrl.network.invariant import batch_invariant, check_invariant
from lit_qrl.network.structure import body, check_positions, check_tokens
from lit_qrl.receipts.ledger import PublishReport, ReceivedLedger, RefusedError
from lit_qrl.rollout.embedded.adapter import EmbeddedAdapter
from lit_qrl.rollout.embedded.cache import SlotCache, free_memory
from lit_qrl.rollout.embedded.decode import Decoder, Drawn, Piece, Random, plan
from lit_qrl.rollout.embedded.held import Held, grouped
from lit_qrl.rollout.embedded.loading import Loader, Modules, skeleton
from lit_qrl.rollout.embedded.sampling import check_sampling, uniforms
from lit_qrl.rollout.embedded.shortage import Shortage, freed
from lit_qrl.rollout.engine import Dialogue, EnginePolicy, Progress, RolloutEngine, SamplerSpec, Turn
from lit_qrl.types import Completion, SamplingParams

DTYPES = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ATTENTION_KINDS = ("full_attention", "sliding_attention", "chunked_attention")
"""What a config calls layers whose only state are keys and values."""
CPU_CACHE_BYTES = 2**29
"""Key-value cache on a CPU, 0.5 GB: a quarter of the memory that the smallest supported run may take."""
GPU_CACHE_SHARE = 0.5
"""Share of the free GPU memory for the cache, with what torch holds unused; the rest is for logits and update."""
SCORE_TOKENS = 2**14
"""Padded tokens of one scoring forward."""


class TransformersEngine(RolloutEngine):
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
    """

    def __init__(
        self,
        max_batch: int | None = None,
        cache_gigabytes: float | None = None,
        dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
        share: Literal["auto", "never"] = "auto",
        keep_operands: bool = True,
        batch_invariant: bool = False,
    ) -> None:
        if max_batch is not None and max_batch < 1:
            raise ConfigError("engine.max_batch is too small.", expected="at least 1", given=max_batch)
        if cache_gigabytes is not None and cache_gigabytes <= 0:
            raise ConfigError("engine.cache_gigabytes is too small.", expected="above 0", given=cache_gigabytes)
        if dtype not in DTYPES or share not in ("auto", "never"):
            raise ConfigError(
                "An option of TransformersEngine is unknown.",
                expected=f"dtype in {', '.join(DTYPES)}; share in auto, never",
                given=f"dtype={dtype}, share={share}",
            )
        self.max_batch, self.cache_gigabytes = max_batch, cache_gigabytes
        self.dtype, self.share, self.keep_operands = DTYPES[dtype], share, keep_operands
        self.batch_invariant = batch_invariant
        self.plain_dtype = self.dtype
        self.spec = SamplerSpec()
        self._modules: Modules | None = None
        self._adapter: EmbeddedAdapter | None = None
        self._borrowed: list[tuple[Tensor, int]] = []
        self._whole = self._checked = False
        self._shortage = Shortage()

    def validate(self, spec: SamplerSpec) -> None:
        check_sampling(spec.sampling)

    def check_model(self, network: nn.Module) -> None:
        """Raise `ConfigError` for a model with layers that carry a state from token to token beside keys and values."""
        config: Any = network.config
        kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
        odd = sorted(kinds - set(ATTENTION_KINDS))
        if odd or getattr(network, "_is_stateful", False):
            raise ConfigError(
                "TransformersEngine decodes attention layers only, and this model has layers that carry a state.",
                expected=f"layers of {' or '.join(ATTENTION_KINDS)}",
                given=f"{type(network).__name__} with {', '.join(odd) or 'a recurrent state'}",
                remedy="Use VLLMEngine for this architecture.",
            )

    def setup(self, spec: SamplerSpec, policy: EnginePolicy) -> None:
        check_sampling(spec.sampling)
        self.spec, self.policy = spec, policy
        learner: Any = policy.network
        self.check_model(learner)
        device = next(learner.parameters()).device
        self._modules, self._adapter = Modules(skeleton(learner, device), device), None
        self._whole, self._checked, self._shortage = False, False, Shortage()

    @property
    def network(self) -> Any:
        """The sampler's Hugging Face model."""
        if self._modules is None or not self._whole:
            raise RuntimeError("The engine holds no whole set of weights: publish to it first.")
        return self._modules.network

    # -------------------------------------------------------------------------------------------------------- weights

    @torch.no_grad()
    def load_weights(
        self, tensors: Iterator[tuple[str, Tensor]], format: NumberFormat | None, version: int
    ) -> PublishReport:
        if self._modules is None:
            raise RuntimeError("The engine is not set up: call setup(spec, policy) first.")
        start = time.perf_counter()
        tell_emulated(type(self).__name__, format, self._modules.device)
        self._whole = False
        if self._adapter is not None:
            self._adapter.remove()
        owned = {parameter.untyped_storage().data_ptr() for parameter in self.policy.network.parameters()}
        share = self.share == "auto" and not self.spec.outlives_update
        loader = Loader(self._modules, format, version, self.dtype, owned, share, self.keep_operands)
        loader.load(tensors)
        if self.batch_invariant and not self._checked:
            self._check_invariant(self._modules)
        self._borrowed, self._whole, self.version = loader.borrowed, True, version
        return PublishReport(
            version=version,
            seconds=time.perf_counter() - start,
            bytes=loader.bytes,
            layers=loader.layers,
            received=loader.received,
        )

    def read_back(self, name: str) -> Tensor | None:
        """Return the tensor that the sampler's modules hold under a checkpoint name, or None."""
        return None if self._modules is None else self._modules.held(name)

    @torch.no_grad()
    def load_adapter(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> PublishReport:
        """Replace the LoRA adapter over an unchanged base; the low-rank term is added unmerged, in its own dtype."""
        start, _ = time.perf_counter(), self.network
        assert self._modules is not None
        if self._adapter is None:
            self._adapter = EmbeddedAdapter(self._modules, self.spec.adapter)
        received = ReceivedLedger(version)
        self._adapter.load(tensors, received)
        return self._partial(received, start)

    @torch.no_grad()
    def perturb(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> PublishReport:
        """Replace the given norms in place, nothing else."""
        start, received = time.perf_counter(), ReceivedLedger(version)
        network, modules = self.network, self._modules
        assert modules is not None
        for name, tensor in tensors:
            if modules.shapes.get(name) != tuple(tensor.shape) or tensor.ndim != 1:
                raise RefusedError(
                    f"{name} is not a norm of the sampler. Expected: the name and shape of a norm's weight."
                )
            held = network.get_parameter(name)
            modules.set_plain(name, tensor.detach().to(device=held.device, dtype=held.dtype, copy=True))
            received.record(name, network.get_parameter(name))
        return self._partial(received, start)

    def _check_invariant(self, modules: Modules) -> None:
        network: Any = modules.network

        def hidden(tokens: Tensor) -> Tensor:
            return body(network)(input_ids=tokens, use_cache=False).last_hidden_state

        check_invariant(hidden, network.config.get_text_config().vocab_size, modules.device)
        self._checked = True

    def _partial(self, received: ReceivedLedger, start: float) -> PublishReport:
        self.version = received.version
        return PublishReport(
            version=received.version,
            seconds=time.perf_counter() - start,
            bytes=received.bytes,
            layers={name: receipt.dtype for name, receipt in received.receipts().items()},
            received=received,
        )

    def _check_current(self) -> None:
        """The learner's own tensors may have moved on since they were published."""
        if any(tensor._version != version for tensor, version in self._borrowed):
            raise RuntimeError(
                f"The sampler shares the learner's weights, and they changed after version {self.version} was "
                "published. Publish before generating, or set data.engine.share to never to sample from older weights."
            )

    # ----------------------------------------------------------------------------------------------------- generation

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        seed: int,
        progress: Progress | None = None,
        sampling: SamplingParams | None = None,
        positions: Sequence[int] | None = None,
    ) -> list[Completion]:
        sampling = sampling or self.spec.sampling
        positions = range(len(prompts)) if positions is None else positions
        check_sampling(sampling)
        self._check_prompts(prompts, sampling)
        self._check_current()

        def random(prompt: int, steps: int) -> Tensor:
            return uniforms(seed, positions[prompt], n, steps)

        batches = self._plan(prompts, n, sampling.max_tokens, self._cache_tokens())
        return self._draw(prompts, n, batches, random, progress, sampling)

    def converse(self, dialogue: Dialogue, sampling: SamplingParams | None = None) -> None:
        """Draw every turn of a dialogue, those that wait at a time in one call.

        Keys and values stay from turn to turn where they fit, so that of a conversation the new tokens alone are
        computed; not in a batch-invariant run, whose rounding must not depend on the turns.
        """
        sampling = sampling or self.spec.sampling
        held = Held(self._cache_tokens(), keeps=not self.batch_invariant)
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
            drawn = self._draw(prompts, n, batches, random, None, params, (held, turns))
            for turn, completion in zip(turns, drawn, strict=True):
                dialogue.answered(turn, completion.cut(turn.max_tokens))

    def _plan(self, prompts: Sequence[Sequence[int]], n: int, steps: int, room: int) -> Iterator[list[Piece]]:
        return plan([len(prompt) for prompt in prompts], n, steps, room, self.max_batch, not self.batch_invariant)

    def _draw(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        batches: Iterable[list[Piece]],
        random: Random,
        progress: Progress | None,
        sampling: SamplingParams,
        kept: tuple[Held, list[Turn]] | None = None,
    ) -> list[Completion]:
        decoder = Decoder(self.network, sampling, self.spec.head_dtype)
        results: list[Completion | None] = [None] * (len(prompts) * n)
        finished = tokens = 0

        def report(ended: int, drawn: int) -> None:
            if progress is not None:
                progress(finished + ended, tokens + drawn)

        def draw(part: list[Piece]) -> Drawn:
            with batch_invariant(self.batch_invariant):
                if kept is None:
                    return decoder.run(prompts, part, random, report)
                held, turns = kept
                try:
                    return decoder.run(prompts, part, random, report, held.of(turns, n), held.whole)
                except (RuntimeError, MemoryError):
                    held.drop()
                    raise

        for batch in batches:
            longest = max(piece.length for piece in batch) + sampling.max_tokens
            for pieces, drawn in self._shortage.halving(batch, longest, draw):
                tokens += self._collect(drawn, pieces, n, results)
                finished += len(drawn.tokens)
                if kept is not None:
                    kept[0].keep(kept[1], n, pieces, drawn)
        return results  # pyright: ignore[reportReturnType]

    def _collect(self, drawn: Drawn, pieces: list[Piece], n: int, results: list[Completion | None]) -> int:
        length, stopped = drawn.length.tolist(), drawn.stopped.tolist()
        tokens, logprobs = drawn.tokens.tolist(), drawn.logprobs.tolist()
        row = 0
        for piece in pieces:
            for index in range(piece.first, piece.first + piece.count):
                results[piece.prompt * n + index] = Completion(
                    token_ids=tokens[row][: length[row]],
                    logprobs=logprobs[row][: length[row]],
                    finish_reason="stop" if stopped[row] else "length",
                    version=self.version,
                )
                row += 1
        return sum(length)

    def _check_prompts(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> None:
        if not prompts or min(map(len, prompts)) == 0:
            raise ValueError("A prompt is empty. Expected: at least one prompt, each of at least one token.")
        check_tokens(self.network.config, prompts)
        remedy = "Lower data.max_prompt_tokens or data.max_completion_tokens."
        check_positions(self.network.config, max(map(len, prompts)), sampling.max_tokens, remedy)

    def _cache_tokens(self) -> int:
        """Return how many tokens of one sequence fit into the cache's memory."""
        weight = self.network.get_input_embeddings().weight
        if self.cache_gigabytes is not None:
            room = int(self.cache_gigabytes * 1e9)
        elif weight.device.type == "cuda":
            room = int(free_memory(weight.device) * GPU_CACHE_SHARE)
        else:
            room = CPU_CACHE_BYTES
        return room // SlotCache.bytes_per_token(self.network.config, weight.dtype)

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the sampler's log-probs (fp32, T = 1, "length − 1") of each sequence's tokens after the first."""
        self._check_current()
        network = self.network
        head = SamplerHead.of(network, self.spec.head_dtype)
        device = network.get_input_embeddings().weight.device
        scores: list[Tensor] = [torch.empty(0)] * len(sequences)
        order = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
        room = SCORE_TOKENS
        while order:
            width = len(sequences[order[0]])
            share, rest = order[: max(1, room // width)], order[max(1, room // width) :]
            tokens = torch.zeros(len(share), width, dtype=torch.long)
            for row, index in enumerate(share):
                tokens[row, : len(sequences[index])] = torch.tensor(sequences[index])
            try:
                tokens = tokens.to(device)
                with batch_invariant(self.batch_invariant):
                    hidden = body(network)(input_ids=tokens, use_cache=False).last_hidden_state
                    logprobs = head.logprobs(hidden[:, :-1], tokens[:, 1:])
            except (RuntimeError, MemoryError) as error:
                freed(error, len(share), "scored")
                room = len(share) // 2 * width
                continue
            order = rest
            for row, index in enumerate(share):
                scores[index] = logprobs[row, : len(sequences[index]) - 1].clone()
        return scores

    def close(self) -> None:
        self._modules, self._adapter, self._borrowed, self._whole = None, None, [], False
