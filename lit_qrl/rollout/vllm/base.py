"""What a vLLM engine is made of and asked for, whether it is in this process or behind its own server."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from lit_qrl.network.experts import expert_stacks, unstacked
from lit_qrl.network.structure import check_tokens
from lit_qrl.rollout.engine import Dialogue, Finished, Progress, RolloutEngine, SamplerSpec, Turn
from lit_qrl.rollout.vllm import folder, parallel, requests, same_kernels
from lit_qrl.rollout.vllm.adapter import check_adapter
from lit_qrl.rollout.vllm.checks import (
    automatic_dtype,
    check_arguments,
    check_experts,
    check_format,
    check_length,
    check_operators,
    check_processes,
    check_unverified,
)
from lit_qrl.rollout.vllm.installation import check_installation
from lit_qrl.rollout.vllm.locations import undescribed
from lit_qrl.rollout.vllm.models import check_model
from lit_qrl.rollout.vllm.requests import Asked
from lit_qrl.run.torch_settings import keep_segments_fixed
from lit_qrl.types import Completion, SamplingParams

Tensors = Iterator[tuple[str, Tensor]]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class VLLM(RolloutEngine):
    """A vLLM somewhere.

    Args:
        dtype: of activations and of all tensors that are not quantized; `auto` is the format's, or what the learner
            computes in, but bf16 where the low-bit kernels take nothing else.
        gpu_memory_utilization: share of the GPU's memory that the engine may take, weights and KV cache together.
        kv_cache_gib: size of the KV cache in GiB; by default what `max_num_seqs` of the longest sequences fill, or what
            the share leaves, whichever is less; on CPU 1.
        max_model_len: longest prompt and completion together, in tokens; None is the sum of the run's two limits.
        max_num_seqs: sequences decoded at a time.
        enforce_eager: no compilation and no CUDA graphs: starts in seconds and decodes slower; always so on CPU.
        quick_start: CUDA graphs without compilation, which takes a minute; `auto` compiles from 50,000 decode steps on.
        max_lora_rank: of adapters published apart from their base; 0 takes the policy's, where one is.
        sleep_level: what `sleep` does on a GPU: 0 nothing, 1 moves the weights to the host, 2 drops them; the KV cache
            is dropped in both. Needs `trainer.strategy: ColocatedStrategy`.
        deep_gemm: use DeepGEMM for fp8_block where vLLM has it; it compiles for minutes at its first use.
        step_timeout: seconds after which a step, a tensor's publish, a sleep or a wake counts as hung and is
            interrupted; native code that cannot be interrupted ends the process with status 75.
        start_timeout: the same for the engine's start, which may compile.
        seed: of the engine's own generators.
        batch_invariant: `same_kernels`, and plain products, the output head's too, by one kernel on both sides, so that
            log-probs of learner and sampler are equal to the last bit: bf16, fp8_row, fp8_block and formats of weights
            alone, which vLLM then holds multiplied out, and adapters over them; dense decoders on one GPU of compute
            capability 9.0.
        same_kernels: compute each operation of a layer as the learner does, so that an aligned format which quantizes
            activations rounds the same numbers on both sides. For a GPU of compute capability 9.0, without
            compilation; `auto` does so for such a format where it was seen to hold, and `true` asks for the GPU alone.
        tensor_parallel_size: processes of the learner, neighbours on one host, that are one engine: each holds a part
            of every matrix, and all draw what any of them asks for.
        engine_args: further arguments of `vllm.LLM`.
        request_seeds: only true, a seed for each request; earlier configurations have the key.
        kv_cache_dtype: only `auto`, the model's; likewise.
        speculative: only 0, no speculative decoding; likewise.
    """

    single_format = True
    kernels = "vllm"
    hands_out = True

    def __init__(
        self,
        dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto",
        gpu_memory_utilization: float = 0.45,
        kv_cache_gib: float | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        enforce_eager: bool = False,
        quick_start: bool | Literal["auto"] = "auto",
        max_lora_rank: int = 0,
        sleep_level: Literal[0, 1, 2] = 0,
        deep_gemm: bool = False,
        step_timeout: float = 600.0,
        start_timeout: float = 1800.0,
        seed: int = 0,
        batch_invariant: bool = False,
        same_kernels: bool | Literal["auto"] = "auto",
        tensor_parallel_size: int = 1,
        engine_args: dict[str, Any] | None = None,
        request_seeds: Literal[True] = True,
        kv_cache_dtype: Literal["auto"] = "auto",
        speculative: Literal[0] = 0,
    ) -> None:
        check_arguments(gpu_memory_utilization, max_num_seqs, max_lora_rank, request_seeds)
        if tensor_parallel_size > 1:
            # Before memory of a GPU is taken: vLLM's own sum over the GPUs of an engine opens buffers of CUDA graphs by
            # handles that segments which grow do not have, and its processes would end at their start.
            keep_segments_fixed()
        self.dtype, self.max_model_len = dtype, max_model_len
        self.max_lora_rank, self.sleep_level, self.deep_gemm = max_lora_rank, sleep_level, deep_gemm
        self.step_timeout, self.start_timeout = step_timeout, start_timeout
        self.gpu_memory_utilization, self.kv_cache_gib = gpu_memory_utilization, kv_cache_gib
        self.batch_invariant = batch_invariant
        self.same_kernels: bool | Literal["auto"] = same_kernels
        self.quick_start: bool | Literal["auto"] = quick_start
        self.tensor_parallel_size, self.draws_together = tensor_parallel_size, tensor_parallel_size > 1
        self.processes: Any = None  # of this engine, joined; None where it is one
        self._arguments: dict[str, Any] = {
            "gpu_memory_utilization": gpu_memory_utilization,
            "max_num_seqs": max_num_seqs,
            "enforce_eager": enforce_eager or not torch.cuda.is_available(),
            "enable_prefix_caching": True,
            "seed": seed,
            "kv_cache_dtype": kv_cache_dtype,
            "speculative_config": speculative or None,
            **(engine_args or {}),
        }
        self.spec = SamplerSpec()
        self.policy: Any = None
        self._folder: Path | None = None
        self._usable = self._poisoned = self.alike = False
        self._kept: tuple[Any, dict[int, Completion]] = (None, {})

    def validate(self, spec: SamplerSpec) -> None:
        """Raise `ConfigError` for what cannot work on this host; called before any weight is loaded."""
        self.spec = spec
        if spec.adapter is not None:
            check_adapter(spec.adapter, self.max_lora_rank)
        check_processes(self._arguments)
        whole = {name: getattr(self, name) for name in ("batch_invariant", "max_lora_rank", "sleep_level")}
        whole["same_kernels"] = self.same_kernels is True
        whole["deep_gemm"] = self.deep_gemm
        parallel.check(self.tensor_parallel_size, spec, whole)
        check_installation()
        check_format(spec.format, spec.quantize_head)
        check_length(self.max_model_len, spec.prompt_limit or 1, spec.sampling.max_tokens, spec.sequence_limit or 0)
        check_operators(spec.format)
        check_unverified(self._arguments)
        if self.batch_invariant:
            rank = 0 if spec.adapter is None else spec.adapter.r
            same_kernels.check_exact(spec.format, self._arguments, rank, self.max_lora_rank)
        if self.same_kernels is True:
            same_kernels.check(self._arguments)

    def check_model(self, network: torch.nn.Module) -> None:
        """Raise `ConfigError` for a model that the installed vLLM lacks or this host cannot run."""
        check_model(network)
        check_experts(network, self.spec.format, self.spec.exclude)
        parallel.check_model(network, self.tensor_parallel_size, self.spec.format)
        if self.batch_invariant:
            same_kernels.check_decoder(network)

    def describe(self, spec: SamplerSpec, network: Any) -> None:
        """Know spec and model without a learner, as `llm_arguments` asks for them."""
        self.spec, self.policy = spec, SimpleNamespace(network=network)

    def choose_dtype(self, spec: SamplerSpec, network: Any) -> torch.dtype:
        """Return the dtype of activations and plain tensors."""
        learner = spec.compute_dtype or next(network.parameters()).dtype
        return DTYPES.get(self.dtype) or automatic_dtype(spec.format, learner)

    def longest(self) -> int:
        """The longest sequence, and room for the one token that vLLM draws when it only scores."""
        limit = getattr(self.policy.network.config, "max_position_embeddings", None)
        if self.max_model_len is not None:
            return self.max_model_len + 1
        if self.spec.prompt_limit is not None:
            longest = max(self.spec.prompt_limit + self.spec.sampling.max_tokens, self.spec.sequence_limit or 0) + 1
            return longest if limit is None else min(longest, limit)
        return limit or 4096

    def arranged(self, tensors: Tensors) -> Tensors:
        """Return a stream with the experts one by one, so that each has a receipt, and without shapes of theirs."""
        stacks = {name: stack for name, stack in expert_stacks(self.policy.network).items() if stack.apart}
        layers = {layer for stack in stacks.values() for layer in stack.layers()}
        return undescribed(unstacked(tensors, stacks), layers)

    def _remove_folder(self) -> None:
        if self._folder is not None:
            folder.remove(self._folder)
            self._folder = None

    # ---------------------------------------------------------------------------------------------------------- drawing

    @abstractmethod
    def _draw(self, kind: str, more: requests.More, take: Callable[[dict[int, Any]], None]) -> None:
        """Draw requests until no more come.

        Args:
            kind: of the work.
            more: returns the requests that came since, or None where none will come any more; it is told whether some
                are under way, and may wait where none is.
            take: called with answers that are there, by the keys of their requests: completions, or log-probs.

        Raises:
            EngineDiedError: when vLLM fails or is silent for too long.
        """

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
        """Return `n` completions of each prompt, prompt-major; `finished` is called whenever some ended.

        What was there before a death is kept for the same call to the next engine.

        Raises:
            EngineDiedError: when vLLM fails or is silent for too long.
        """
        self._check_ready()
        drawn_with, records = sampling or self.spec.sampling, self.spec.kept and sampling is None
        numbers = range(len(prompts)) if positions is None else positions
        prompts, numbers, own = parallel.joined(prompts, numbers, (n, seed, drawn_with), self.processes)
        self._check(prompts, drawn_with.max_tokens)
        call = (self.version, prompts, n, seed, drawn_with, numbers)
        kept = self._kept[1] if self._kept[0] == call and not self.draws_together else {}
        self._kept = call, kept
        first, last = own.start * n, own.stop * n  # of other processes of this engine are the rest
        drawn = {row - first: one for row, one in kept.items() if first <= row < last}
        tokens = sum(len(one.token_ids) for one in drawn.values())
        if drawn and finished is not None:  # what the engine before has drawn: whoever asks again has forgotten it
            finished(dict(drawn))

        def asked(row: int) -> Asked:
            place, sample = divmod(row, n)
            drawn_by = requests.request_seed(seed, numbers[place], sample)
            return Asked(row, prompts[place], drawn_with, drawn_by, group=place, records=records)

        def take(answers: Mapping[int, Completion]) -> None:
            nonlocal tokens
            kept.update(answers)
            mine = {row - first: one for row, one in answers.items() if first <= row < last}
            drawn.update(mine)
            tokens += sum(len(one.token_ids) for one in mine.values())
            if progress is not None:
                progress(len(drawn), tokens)
            if finished is not None:
                finished(mine)

        left = [asked(row) for row in requests.by_length(prompts, n) if row not in kept]
        self._draw("draw", requests.at_once(left), take)
        self._kept = (None, {})
        return [drawn[row] for row in range(last - first)]

    def converse(self, dialogue: Dialogue, sampling: SamplingParams | None = None) -> None:
        """Draw every turn of a dialogue as soon as it is there, beside those that are being drawn.

        Raises:
            EngineDiedError: as `generate` does.
        """
        self._check_ready()
        drawn_with, records = sampling or self.spec.sampling, self.spec.kept and sampling is None
        turns: dict[int, Turn] = {}  # a sequence waits for one answer at a time

        def more(under_way: bool) -> list[Asked] | None:
            if not dialogue.open:
                return None
            found = {turn.index: turn for turn in dialogue.waiting("no" if under_way else "any")}
            turns.update(found)
            return [asked(turn) for turn in found.values()]

        def asked(turn: Turn) -> Asked:
            self._check([turn.tokens], turn.max_tokens)
            sampling, seed = replace(drawn_with, max_tokens=turn.max_tokens), requests.request_seed(turn.seed, 0, 0)
            return Asked(turn.index, turn.tokens, sampling, seed, group=turn.index, records=records)

        def take(answers: Mapping[int, Completion]) -> None:
            for index, completion in answers.items():
                dialogue.answered(turns.pop(index), completion)

        self._draw("draw", more, take)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the sampler's log-probs (fp32, T = 1, "length − 1") of each sequence's tokens after the first."""
        self._check_ready()
        self._check(sequences, 1)
        scores: dict[int, Tensor] = {}
        asked = [Asked(row, sequence, group=row) for row, sequence in enumerate(sequences)]
        self._draw("score", requests.at_once(asked), scores.update)
        return [scores[row] for row in range(len(sequences))]

    def _check_ready(self) -> None:
        if not self._usable:
            raise RuntimeError("The engine has no complete weights yet: publish all of them with load_weights() first.")

    def _check(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        requests.check_lengths(prompts, max_tokens, self.longest())
        check_tokens(self.policy.network.config, prompts)

    def _noted(self, answer: Any) -> Any:
        """Return an answer, and remember where it is not finite: a page keeps NaN until it is overwritten."""
        values = answer.tolist() if isinstance(answer, Tensor) else answer.logprobs
        self._poisoned |= not all(map(math.isfinite, values))
        return answer
