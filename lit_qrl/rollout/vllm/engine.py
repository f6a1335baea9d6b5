"""A vLLM engine inside the trainer's process that receives low-bit weights in memory and proves that they arrived."""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from lit_qrl.errors import ConfigError, within_memory
from lit_qrl.formats import support
from lit_qrl.formats.base import NumberFormat
from lit_qrl.functional.logprobs import softmax_logprobs
from lit_qrl.network.experts import expert_stacks, unstacked
from lit_qrl.network.linears import quantizable_linears
from lit_qrl.network.structure import check_tokens
from lit_qrl.precision.layers.lora_linear import sum_factors
from lit_qrl.precision.vllm_kernels.borrowed import TILE_IN, TILE_OUT, MarlinNVFP4
from lit_qrl.precision.vllm_kernels.exact import drawn_logprobs, flash_attention, product
from lit_qrl.receipts.ledger import PublishError, PublishReport, ReceivedLedger
from lit_qrl.rollout.engine import (
    Dialogue,
    EngineDiedError,
    EnginePolicy,
    Finished,
    Progress,
    RolloutEngine,
    SamplerSpec,
    Turn,
)
from lit_qrl.rollout.vllm import folder, parallel, requests, same_kernels
from lit_qrl.rollout.vllm.adapter import check_adapter
from lit_qrl.rollout.vllm.arguments import llm_arguments
from lit_qrl.rollout.vllm.checks import (
    automatic_dtype,
    check_arguments,
    check_device_memory,
    check_experts,
    check_format,
    check_groups,
    check_length,
    check_operators,
    check_processes,
    check_same_format,
    check_unverified,
)
from lit_qrl.rollout.vllm.errors import blamed, deadly
from lit_qrl.rollout.vllm.installation import check_installation, check_routes
from lit_qrl.rollout.vllm.live_model import LiveModel
from lit_qrl.rollout.vllm.locations import undescribed
from lit_qrl.rollout.vllm.models import check_model, refused_model
from lit_qrl.rollout.vllm.parallel import joined
from lit_qrl.rollout.vllm.patches import apply_all
from lit_qrl.rollout.vllm.process import (
    collect_memory,
    kept_process_state,
    own_world,
    prepare_environment,
    shutdown,
    undone_on_failure,
)
from lit_qrl.rollout.vllm.upkeep import unlock_workspaces
from lit_qrl.rollout.vllm.watchdog import Watchdog
from lit_qrl.run.console import phase, without_bars
from lit_qrl.run.imports import uncollected
from lit_qrl.run.torch_settings import keep_segments_fixed
from lit_qrl.types import Completion, SamplingParams

SLEEP_REMEDY = "A sleep of level 1 keeps the weights in memory of the host: set data.engine.sleep_level to 2."
WAKE_REMEDY = "Lower data.engine.gpu_memory_utilization, or set trainer.strategy.offload_optimizer to true"

Tensors = Iterator[tuple[str, Tensor]]
Load = Callable[[Tensors, int], ReceivedLedger]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class VLLMEngine(RolloutEngine):
    """Draws completions with vLLM, in process, on CPU or GPU; in a run of several processes each has one, or a part.

    The engine starts with random weights in a folder of its own that holds a config alone; the first publish fills it.
    It is built at the first `load_weights`, when the format is known, and holds that format from then on.

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
    records_kept = hands_out = True

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
        self.routed: requests.Routed | None = None
        self.format: NumberFormat | None = None
        self.llm: Any = None
        self.live: LiveModel | None = None
        self._adapter_active = self._started = False
        self._folder: Path | None = None
        self._owns_process_group = False
        self._usable = self._poisoned = self._asleep = self.lent = self.alike = False

    # -------------------------------------------------------------------------------------------------------- set-up

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

    def check_routes(self, user: str) -> None:
        """Raise `ConfigError` where the installed vLLM does not say which experts its tokens took."""
        check_routes(user)

    def setup(self, spec: SamplerSpec, policy: EnginePolicy) -> None:
        """Check the model against vLLM and the GPU's memory; the engine itself starts with the first weights."""
        self.spec, self.policy, self.format = spec, policy, spec.format
        network = policy.network
        self.routed = requests.routed_layers(network) if spec.routes else None
        self.plain_dtype = dtype = self.choose_dtype(spec, network)
        check_model(network, dtype)
        check_experts(network, spec.format, spec.exclude)
        if self.batch_invariant:
            same_kernels.check_learner(network, dtype, exact=True)
        asked = self.batch_invariant or self.same_kernels
        against = same_kernels.IN_PARTS if self.draws_together else None
        self.alike = same_kernels.chosen(asked, spec, network, dtype, self._arguments, against)
        if torch.cuda.is_available():
            bits = self.format.bits_per_weight if self.format is not None else 8.0 * dtype.itemsize
            check_device_memory(
                network, bits / self.tensor_parallel_size, self.gpu_memory_utilization, sleeps=self.sleep_level > 0
            )

    def describe(self, spec: SamplerSpec, network: Any) -> None:
        """Know spec and model without a learner, as `llm_arguments` asks for them."""
        self.spec, self.policy = spec, SimpleNamespace(network=network)

    def choose_dtype(self, spec: SamplerSpec, network: Any) -> torch.dtype:
        """Return the dtype of activations and plain tensors."""
        learner = spec.compute_dtype or next(network.parameters()).dtype
        return DTYPES.get(self.dtype) or automatic_dtype(spec.format, learner)

    def _start(self, format: NumberFormat | None) -> None:
        if self.policy is None or self.plain_dtype is None:
            raise RuntimeError("The engine has no policy yet: call setup() before load_weights().")
        self.format = format
        owns_process_group = not torch.distributed.is_initialized()
        with undone_on_failure(self._remove_folder):
            self._build(format, self.policy, self.plain_dtype)
        self._owns_process_group = owns_process_group
        if owns_process_group:  # of this one process, at which Lightning advises to reduce every metric over it
            warnings.filterwarnings("ignore", message=".*sync_dist=True.*")
        self._started = True
        live: LiveModel = self.llm.collective_rpc("connect", args=(self.policy.network, self.draws_together))[0]
        self.live = live
        if self.alike:
            self.policy.attention = flash_attention
        if self.batch_invariant:
            self.policy.product = product
            self.policy.pick = drawn_logprobs if live.config.use_v2_model_runner else softmax_logprobs
            sum_factors(self.policy.network, merged=self.spec.adapter is None)
        check_groups(format, live.holders(quantizable_linears(self.policy.network, self.spec.exclude)))

    def _build(self, format: NumberFormat | None, policy: EnginePolicy, dtype: torch.dtype) -> None:
        prepare_environment(self.deep_gemm, self.kv_cache_gib, self.spec.kept)
        longest, layers = self.longest(), (self.spec.exclude, self.spec.quantize_head)
        self._folder = folder.model_folder(policy.network, format, *layers, dtype, longest)
        arguments = llm_arguments(self, self._folder, dtype, longest)
        size = self.tensor_parallel_size
        alike = same_kernels.built(self.alike, self.batch_invariant)
        with kept_process_state(), own_world(size) as processes, alike:
            if size > 1:
                self.processes = processes
                arguments |= {"tensor_parallel_size": size, "distributed_executor_backend": "external_launcher"}
            with phase("vLLM imported"), uncollected():
                apply_all()
                from vllm import LLM  # pyright: ignore[reportAttributeAccessIssue]

            try:
                with self._watchdog("the start", self.start_timeout), phase("vLLM started"), without_bars():
                    self.llm = LLM(**arguments)
            except Exception as error:
                if not self._started and not isinstance(error, TimeoutError):
                    raise refused_model(policy.network, error) from error
                again = " again" if self._started else ""
                raise EngineDiedError(f"vLLM did not start{again}: {type(error).__name__}: {error}") from error

    def longest(self) -> int:
        """The longest sequence, and room for the one token that vLLM draws when it only scores."""
        limit = getattr(self.policy.network.config, "max_position_embeddings", None)
        if self.max_model_len is not None:
            return self.max_model_len + 1
        if self.spec.prompt_limit is not None:
            longest = max(self.spec.prompt_limit + self.spec.sampling.max_tokens, self.spec.sequence_limit or 0) + 1
            return longest if limit is None else min(longest, limit)
        return limit or 4096

    # ----------------------------------------------------------------------------------------------------- publishing

    def arranged(self, tensors: Tensors) -> Tensors:
        """Return a stream with the experts one by one, so that each has a receipt, and without shapes of theirs."""
        stacks = {name: stack for name, stack in expert_stacks(self.policy.network).items() if stack.apart}
        layers = {layer for stack in stacks.values() for layer in stack.layers()}
        return undescribed(unstacked(tensors, stacks), layers)

    def load_weights(self, tensors: Tensors, format: NumberFormat | None, version: int) -> PublishReport:
        """Replace all weights; the report's `received` says what the engine's modules hold.

        Raises:
            PublishError: when a layer came only in part, or vLLM's loader refuses a tensor. The engine then refuses to
                generate until a publish succeeds.
            ValueError: for another format than the engine was built for.
        """
        start = time.perf_counter()
        if self.llm is None:
            self._start(format)
        else:
            check_same_format(format, self.format)
        live = self._awake()

        def load(stream: Tensors, version: int) -> ReceivedLedger:
            self.llm.start_weight_update()
            self.llm.update_weights({"update_info": {"version": version, "tensors": stream}})
            versioned = [str(version)] if hasattr(self.llm, "get_weight_version") else []  # 0.26 keeps none
            self.llm.finish_weight_update(*versioned)
            return self.llm.collective_rpc("update_ledger")[0]

        report = self._publish(tensors, load, version, start)
        report.layers = live.formats()
        self._adapter_active = False
        return report

    def load_adapter(self, tensors: Tensors, version: int) -> PublishReport:
        """Replace the LoRA adapter over an unchanged base; completions use it from then on."""
        start = time.perf_counter()
        self._awake(complete=True)
        report = self._publish(tensors, self._in_place("replace_adapter", self.spec.adapter), version, start)
        self._adapter_active = True
        return report

    def perturb(self, tensors: Tensors, version: int) -> PublishReport:
        """Replace the given norms in place, nothing else."""
        start = time.perf_counter()
        self._awake(complete=True)
        return self._publish(tensors, self._in_place("perturb"), version, start)

    def _in_place(self, what: str, *args: Any) -> Load:
        """Return what has the worker replace tensors where they are."""

        def load(stream: Tensors, version: int) -> ReceivedLedger:
            ledger = ReceivedLedger(version)
            self.llm.collective_rpc(what, args=(stream, ledger, *args))
            return ledger

        return load

    def _publish(self, tensors: Tensors, load: Load, version: int, start: float) -> PublishReport:
        self._usable = False
        try:
            watchdog = self._watchdog("the publish of one tensor")
            with blamed(tensors, version, watchdog) as stream:
                ledger = load(stream, version)
        except BaseException as error:
            with suppress(Exception):  # of an engine that died
                self.llm.collective_rpc("abandon_update")
            if isinstance(error, PublishError):
                self._reset_caches()
            raise
        ledger.prefix_reset = self._reset_caches()
        receipts = ledger.receipts()
        self._usable, self.version = True, version
        return PublishReport(
            version=version,
            seconds=time.perf_counter() - start,
            bytes=ledger.bytes,
            layers=dict.fromkeys(receipts, str(self.plain_dtype).removeprefix("torch.")),
            received=ledger,
        )

    def _reset_caches(self) -> bool:
        assert self.live is not None
        if self._poisoned:
            self.llm.collective_rpc("clear_kv_cache")
            self._poisoned = False
        outside = bool(self._arguments.get("kv_transfer_config"))  # prefixes that a connector keeps
        return bool(self.llm.reset_prefix_cache(reset_connector=outside))

    def _awake(self, complete: bool = False) -> LiveModel:
        if self._asleep:
            raise RuntimeError("The engine sleeps: call wake() before publishing.")
        if self.live is None or (complete and not self._usable):
            raise RuntimeError("The engine has no complete weights yet: publish all of them with load_weights() first.")
        return self.live

    def own_part(self, name: str, tensor: Tensor) -> Tensor:
        """Return the part of a sent tensor that this process holds; all of it where the engine has no other."""
        return tensor if self.live is None else self.live.own_part(name, tensor)

    def read_back(self, name: str) -> Tensor | None:
        """Return the live tensor under its checkpoint name, or None where vLLM repacked the layer."""
        return None if self.live is None else self.live.read_back(name)

    def read_columns(self, layer: str, columns: Sequence[int]) -> Tensor | None:
        """Return columns ("out columns") of a layer's weight as its GEMM multiplies with them, or None if unknown."""
        return None if self.live is None else self.live.read_columns(layer, columns)

    def _watchdog(self, what: str, timeout: float | None = None) -> Watchdog:
        return Watchdog(timeout or self.step_timeout, self.spec.on_hang, what=what)

    # ---------------------------------------------------------------------------------------------------------- drawing

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
        kept, drawn_with = self.spec.kept and sampling is None, sampling or self.spec.sampling
        number = range(len(prompts)) if positions is None else positions
        prompts, number, own = joined(prompts, number, (n, seed, drawn_with), self.processes)
        order = requests.by_length(prompts, n)
        seeds = [requests.request_seed(seed, number[i // n], i % n) for i in order]
        params = [requests.drawing(drawn_with, one, kept) for one in seeds]
        first, last = own.start * n, own.stop * n  # of other processes of this engine are the rest
        drawn: dict[int, Completion] = {}
        tokens = 0

        def take(outputs: Mapping[int, Any]) -> None:
            nonlocal tokens
            read = {order[position]: self._read(output, kept) for position, output in outputs.items()}
            mine = {i - first: one for i, one in read.items() if first <= i < last}
            drawn.update(mine)
            tokens += sum(len(one.token_ids) for one in mine.values())
            if progress is not None:
                progress(len(drawn), tokens)
            if finished is not None:
                finished(mine)

        with kept_process_state():
            self._run([prompts[i // n] for i in order], params, take)
        return [drawn[i] for i in range(last - first)]

    def converse(self, dialogue: Dialogue, sampling: SamplingParams | None = None) -> None:
        """Draw every turn of a dialogue as soon as it is there, beside those that are being drawn.

        Raises:
            EngineDiedError: as `generate` does.
        """
        self._awake(complete=True)
        kept, drawn_with = self.spec.kept and sampling is None, sampling or self.spec.sampling
        turns: dict[int, Turn] = {}  # a sequence waits for one answer at a time

        def more(waiting: bool) -> list[requests.Asked] | None:
            if not dialogue.open:
                return None
            found = {turn.index: turn for turn in dialogue.waiting("no" if waiting else "any")}
            turns.update(found)
            return [(index, turn.tokens, asked(turn)) for index, turn in found.items()]

        def asked(turn: Turn) -> Any:
            seed = requests.request_seed(turn.seed, 0, 0)
            return requests.drawing(replace(drawn_with, max_tokens=turn.max_tokens), seed, kept)

        def take(outputs: Mapping[int, Any]) -> None:
            for index, output in outputs.items():
                dialogue.answered(turns.pop(index), self._read(output, kept))

        with kept_process_state():
            self._draw(more, take)

    def _read(self, output: Any, kept: bool) -> Completion:
        one = requests.completion(output, self.version, self.routed, kept)
        self._poisoned |= not all(map(math.isfinite, one.logprobs))
        return one

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the sampler's log-probs (fp32, T = 1, "length − 1") of each sequence's tokens after the first."""
        self._awake(complete=True)
        scores: dict[int, Tensor] = {}

        def take(outputs: Mapping[int, Any]) -> None:
            scores.update({row: requests.scores(output, sequences[row]) for row, output in outputs.items()})

        with kept_process_state():
            self._run(sequences, [requests.scoring() for _ in sequences], take)
        self._poisoned |= not all(bool(values.isfinite().all()) for values in scores.values())
        return [scores[row] for row in range(len(sequences))]

    def _run(self, prompts: Sequence[Sequence[int]], params: list[Any], take: Callable[[dict[int, Any]], None]) -> None:
        """Draw one request of each prompt; `take` gets outputs by the prompts' positions."""
        requests.check_lengths(prompts, params, self.longest())
        check_tokens(self.policy.network.config, prompts)
        self._draw(requests.at_once(list(zip(range(len(prompts)), prompts, params, strict=True))), take)

    def _draw(
        self, more: Callable[[bool], Sequence[requests.Asked] | None], take: Callable[[dict[int, Any]], None]
    ) -> None:
        """Draw from a cache that is sound; an engine that dies of it cannot be used."""
        if self._poisoned:  # it woke, or drew NaN, and no publish came since
            self._reset_caches()
        try:
            requests.run(self.llm, more, take, self._adapter_active, self._watchdog("one step"))
        except EngineDiedError:
            self._usable = False
            raise

    # ------------------------------------------------------------------------------------------------------------ sleep

    @property
    def holds_weights(self) -> bool:
        """False before the first publish, after a death, and after a sleep of level 2."""
        return self._usable

    def sleep(self) -> None:
        """Free the KV cache, and the weights as `sleep_level` says, or die of it; does nothing on CPU."""
        if self.llm is not None and self.sleep_level and torch.cuda.is_available() and not self._asleep:
            watchdog = self._watchdog("the sleep")
            with deadly("did not sleep", watchdog), within_memory("the engine fell asleep", SLEEP_REMEDY):
                self.llm.sleep(level=self.sleep_level)
            self._asleep = True
            self._usable = self._usable and self.sleep_level < 2

    def wake(self) -> None:
        """Take the memory back, or die of it; after level 2 all weights must be published before anything is drawn."""
        if not self._asleep:
            return
        with deadly("did not wake", self._watchdog("waking"), WAKE_REMEDY):
            self.llm.wake_up()
            self.llm.collective_rpc("check_constants")  # which no publish need follow
        # Memory comes back with arbitrary contents, at the addresses that it had.
        unlock_workspaces()
        self._poisoned = True
        if not self._usable and self.max_lora_rank:
            self.llm.collective_rpc("clear_adapter")
        self._asleep = False

    # ---------------------------------------------------------------------------------------------------------- lending

    def check_sharing(self, format: NumberFormat | None) -> None:
        """Raise `ConfigError` where a learner could not read the engine's weights in place of its own."""
        device = support.device_here()
        if format is None or device not in support.row_of(format).vllm_lends:
            name, device = "none" if format is None else format.name, device.upper()
            known = ", ".join(support.names_where(lambda row: "cuda" in row.vllm_lends))
            raise ConfigError(
                f"share_weights does not work with {name} on {device}: vLLM's layout of it is not known here.",
                expected=f"{known} on CUDA, which vLLM holds in Marlin's layout",
                given=f"{name} on {device}",
                remedy="Set share_weights to false.",
            )
        if self.sleep_level:
            raise ConfigError(
                "An engine that sleeps would take the base away from the learner that shares it.",
                expected="data.engine.sleep_level: 0 with share_weights",
                given=self.sleep_level,
                remedy="Set one of them to its default.",
            )

    def stored_weight(self, layer: str) -> MarlinNVFP4 | None:
        """Return a layer's NVFP4 weight as it lies in the memory of Marlin's kernel, or None where it lies otherwise.

        Args:
            layer: name in the checkpoint, such as `model.layers.0.self_attn.k_proj`.
        """
        place = None if self.live is None else self.live.locate_layer(layer)
        module: Any = None if place is None else place.module
        words, scales = getattr(module, "weight", None), getattr(module, "weight_scale", None)
        if place is None or words is None or scales is None or words.ndim != 2 or scales.dtype != torch.float8_e4m3fn:
            return None
        inputs, outputs = int(module.input_size_per_partition), int(module.output_size_per_partition)
        whole = (inputs // TILE_IN, outputs * TILE_IN // 8)  # what Marlin padded has other sides
        if words.dtype != torch.int32 or tuple(words.shape) != whole or tuple(scales.shape) != (whole[0], outputs):
            return None
        if inputs % TILE_IN or outputs % TILE_OUT:
            return None
        sizes = [int(size) for size in module.output_sizes] if place.parts else [outputs]
        self.lent = True
        return MarlinNVFP4(
            words.detach(),
            scales.detach().view(torch.uint8),
            sum(sizes[: place.part]),
            sizes[place.part],
        )

    # ------------------------------------------------------------------------------------------------------------ end

    def close(self) -> None:
        """Free the engine, its process group if it made one, and its folder."""
        llm, self.llm, self.live = self.llm, None, None
        self._usable = self._asleep = self._adapter_active = False
        if llm is not None:
            shutdown(llm, self._owns_process_group, keep_weights=self.lent)
            del llm
            collect_memory()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            folder.remove(self._folder)
            self._folder = None
