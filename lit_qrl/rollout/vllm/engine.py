"""A vLLM engine inside the trainer's process that receives low-bit weights in memory and proves that they arrived."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lit_qrl.errors import ConfigError
from lit_qrl.formats.base import NumberFormat
from lit_qrl.network.experts import expert_stacks, unstacked
from lit_qrl.network.linears import quantizable_linears
from lit_qrl.network.sampler_kernels import adopt
from lit_qrl.receipts.clock import gc_pause
from lit_qrl.receipts.ledger import PublishError, PublishReport, ReceivedLedger
from lit_qrl.rollout.engine import (
    EngineDiedError,
    EnginePolicy,
    RolloutEngine,
    SamplerSpec,
)
from lit_qrl.rollout.vllm import cache_scales, flight, folder, invariant, parallel, requests
from lit_qrl.rollout.vllm.adapter import LiveAdapter, check_adapter
from lit_qrl.rollout.vllm.arguments import first_runner, llm_arguments, proposals
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
    check_speculative,
)
from lit_qrl.rollout.vllm.drawing import Drawing
from lit_qrl.rollout.vllm.errors import Sender, blamed
from lit_qrl.rollout.vllm.installation import check_installation, check_routes
from lit_qrl.rollout.vllm.lending import MarlinLender
from lit_qrl.rollout.vllm.live_model import LiveModel
from lit_qrl.rollout.vllm.locations import undescribed
from lit_qrl.rollout.vllm.models import check_model, refused_model
from lit_qrl.rollout.vllm.patches import apply_all
from lit_qrl.rollout.vllm.process import kept_process_state, own_world, prepare_environment
from lit_qrl.rollout.vllm.reload import register_head_bias
from lit_qrl.rollout.vllm.shutdown import collect_memory, shutdown
from lit_qrl.rollout.vllm.sleeping import Sleeping
from lit_qrl.rollout.vllm.start import undone_on_failure
from lit_qrl.rollout.vllm.warm_up import warm_up
from lit_qrl.rollout.vllm.watchdog import Watchdog
from lit_qrl.run.console import phase, without_bars

Tensors = Iterator[tuple[str, Tensor]]
Load = Callable[[Tensors, ReceivedLedger], None]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class VLLMEngine(Drawing, Sleeping, MarlinLender, RolloutEngine):
    """Draws completions with vLLM, in process, on CPU or GPU; in a run of several processes each has one, or a part.

    The engine starts with random weights in a folder of its own that holds a config alone; the first publish fills it.
    It is built at the first `load_weights`, when the format is known, and holds that format from then on.

    Args:
        dtype: of activations and of all tensors that are not quantized; `auto` is the format's, or what the learner
            computes in, but bf16 where the low-bit kernels take nothing else.
        gpu_memory_utilization: share of the GPU's memory that the engine may take, weights and KV cache together.
        kv_cache_gib: size of the KV cache in GiB; by default what `max_num_seqs` of the longest sequences fill, or what
            the share leaves, whichever is less; on CPU 1.
        kv_cache_dtype: `auto` is the model's; `fp8` is a source of mismatch of its own. Its scales are taken anew after
            each publish, of the prompts that are drawn for first.
        max_model_len: longest prompt and completion together, in tokens; None is the sum of the run's two limits.
        max_num_seqs: sequences decoded at a time.
        enforce_eager: no compilation and no CUDA graphs: starts in seconds and decodes slower; always so on CPU.
        quick_start: CUDA graphs without compilation, which takes a minute; `auto` compiles from 50,000 decode steps on.
        max_lora_rank: of adapters published apart from their base; 0 allows none.
        sleep_level: what `sleep` does on a GPU: 0 nothing, 1 moves the weights to the host, 2 drops them; the KV cache
            is dropped in both. Needs `trainer.strategy: ColocatedStrategy`.
        deep_gemm: use DeepGEMM for fp8_block where vLLM has it; it compiles for minutes at its first use.
        speculative: tokens proposed at a time by looking up the last ones earlier in the sequence; the model accepts or
            replaces them, so that the distribution stays its own. 0 draws one token at a time.
        request_seeds: seed each request, so that a completion does not depend on what it is batched with.
        step_timeout: seconds after which a step, a tensor's publish, a sleep or a wake counts as hung and is
            interrupted; native code that cannot be interrupted ends the process with status 75.
        start_timeout: the same for the engine's start, which may compile.
        seed: of the engine's own generators.
        batch_invariant: vLLM's batch-invariant mode, and a learner whose forward pass calls the same kernels: their
            log-probs are equal to the last bit. For dense decoders on one GPU of compute capability 9.0.
        tensor_parallel_size: processes of the learner, neighbours on one host, that are one engine: each holds a part
            of every matrix, and all draw what any of them asks for.
        engine_args: further arguments of `vllm.LLM`.
    """

    single_format = True
    kernels = "vllm"
    records_kept = hands_out = takes_in_flight = True

    def __init__(
        self,
        dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto",
        gpu_memory_utilization: float = 0.45,
        kv_cache_gib: float | None = None,
        kv_cache_dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        enforce_eager: bool = False,
        quick_start: bool | Literal["auto"] = "auto",
        max_lora_rank: int = 0,
        sleep_level: Literal[0, 1, 2] = 0,
        deep_gemm: bool = False,
        request_seeds: bool = True,
        step_timeout: float = 600.0,
        start_timeout: float = 1800.0,
        seed: int = 0,
        batch_invariant: bool = False,
        tensor_parallel_size: int = 1,
        engine_args: dict[str, Any] | None = None,
        speculative: int = 0,
    ) -> None:
        check_arguments(gpu_memory_utilization, max_num_seqs, max_lora_rank)
        parallel.prepare(tensor_parallel_size)
        self.dtype, self.max_model_len = dtype, max_model_len
        self.max_lora_rank, self.sleep_level, self.deep_gemm = max_lora_rank, sleep_level, deep_gemm
        self.request_seeds = request_seeds
        self.step_timeout, self.start_timeout = step_timeout, start_timeout
        self.gpu_memory_utilization, self.kv_cache_gib = gpu_memory_utilization, kv_cache_gib
        self.batch_invariant = invariant.asked_for(batch_invariant)
        self.quick_start: bool | Literal["auto"] = bool(batch_invariant) or quick_start
        self.tensor_parallel_size, self.draws_together = tensor_parallel_size, tensor_parallel_size > 1
        self.processes: Any = None  # of this engine, joined; None where it is one
        self._arguments: dict[str, Any] = {
            "gpu_memory_utilization": gpu_memory_utilization,
            "kv_cache_dtype": kv_cache_dtype,
            "max_num_seqs": max_num_seqs,
            "enforce_eager": enforce_eager or not torch.cuda.is_available(),
            "enable_prefix_caching": True,
            "seed": seed,
            **proposals(speculative),
            **(engine_args or {}),
        }
        self.spec = SamplerSpec()
        self.policy: Any = None
        self.routed: requests.Routed | None = None
        self.format: NumberFormat | None = None
        self.llm: Any = None
        self.live: LiveModel | None = None
        self._routes: Any = None  # `RecordedRoutes` of the plug-in
        self._adapter: LiveAdapter | None = None
        self._adapter_active = self._started = False
        self._folder: Path | None = None
        self._owns_process_group = False
        self._usable = self._poisoned = self._asleep = self.lent = self._scales_due = False
        self.cache_dtype = self._arguments["kv_cache_dtype"]

    # -------------------------------------------------------------------------------------------------------- set-up

    def validate(self, spec: SamplerSpec) -> None:
        """Raise `ConfigError` for what cannot work on this host; called before any weight is loaded."""
        self.spec = spec
        if spec.adapter is not None:
            check_adapter(spec.adapter, self.max_lora_rank)
        check_processes(self._arguments)
        whole = {name: getattr(self, name) for name in ("batch_invariant", "max_lora_rank", "sleep_level")}
        whole["request_seeds: false, or deep_gemm"] = not self.request_seeds or self.deep_gemm
        whole["kv_cache_dtype"] = cache_scales.quantized(self.cache_dtype) and self.cache_dtype
        whole["speculative"] = self._arguments.get("speculative_config")
        parallel.check(self.tensor_parallel_size, spec, whole)
        check_installation()
        check_format(spec.format, spec.quantize_head)
        check_length(self.max_model_len, spec.prompt_limit or 1, spec.sampling.max_tokens, spec.sequence_limit or 0)
        check_operators(spec.format)
        cache_scales.check_host(self.cache_dtype)
        check_speculative(self._arguments, spec)
        flight.check(spec, self.cache_dtype, bool(whole["speculative"]))
        if self.batch_invariant:
            invariant.check(spec.format, self._arguments, self.max_lora_rank)

    def check_model(self, network: torch.nn.Module) -> None:
        """Raise `ConfigError` for a model that the installed vLLM lacks or this host cannot run."""
        check_model(network)
        check_experts(network, self.spec.format, self.spec.exclude)
        parallel.check_model(network, self.tensor_parallel_size, self.spec.format)
        if self.batch_invariant:
            invariant.check_model(network)

    def check_routes(self, user: str) -> None:
        """Raise `ConfigError` where the installed vLLM does not say which experts its tokens took."""
        check_routes(user)

    def setup(self, spec: SamplerSpec, policy: EnginePolicy) -> None:
        """Check the model against vLLM and the GPU's memory; the engine itself starts with the first weights."""
        self.spec, self.policy, self.format = spec, policy, spec.format
        network = policy.network
        self.routed = requests.routed_layers(network) if spec.routes else None
        self._flight = flight.flight_of(self, spec.in_flight)
        learner = spec.compute_dtype or next(network.parameters()).dtype
        self.plain_dtype = dtype = DTYPES.get(self.dtype) or automatic_dtype(spec.format, learner)
        check_model(network, dtype)
        check_experts(network, spec.format, spec.exclude)
        if self.batch_invariant:
            invariant.check_model(network, dtype)
        if torch.cuda.is_available():
            bits = self.format.bits_per_weight if self.format is not None else 8.0 * dtype.itemsize
            check_device_memory(
                network, bits / self.tensor_parallel_size, self.gpu_memory_utilization, sleeps=self.sleep_level > 0
            )

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
        self.live, self._adapter = LiveModel(self.llm, self.policy.network, self.draws_together), None
        if self.batch_invariant:
            adopt(self.policy.network, invariant.kernels(self.live.model, self.plain_dtype))
        if cache_scales.quantized(self.cache_dtype):
            cache_scales.check_scales(self.live.model)
        register_head_bias(self.live.model, self.policy.network)
        if self.routed is not None and not torch.cuda.is_available():
            from lit_qrl_vllm_fast.routes import record

            routed = self.routed
            args = self.live.model, routed.layers, routed.experts, routed.chosen
            self._routes = record(self.llm, *args)
        check_groups(format, self.live.held(quantizable_linears(self.policy.network, self.spec.exclude)))
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        warm_up(format, next(self.policy.network.parameters()).dtype, self.plain_dtype, device)

    def _build(self, format: NumberFormat | None, policy: EnginePolicy, dtype: torch.dtype) -> None:
        prepare_environment(self.deep_gemm, self.kv_cache_gib, first_runner(self._arguments, self.spec))
        longest, layers = self._longest(), (self.spec.exclude, self.spec.quantize_head)
        self._folder = folder.model_folder(policy.network, format, *layers, dtype, longest)
        arguments = llm_arguments(
            self.spec,
            policy.network,
            self._folder,
            dtype,
            longest,
            self._arguments,
            quick_start=self.quick_start,
            kv_cache_gib=self.kv_cache_gib,
            max_lora_rank=self.max_lora_rank,
            sleep_level=self.sleep_level,
            parts=self.tensor_parallel_size,
        )
        size = self.tensor_parallel_size
        with kept_process_state(), own_world(size) as processes, invariant.learner_left_alone(self.batch_invariant):
            if size > 1:
                self.processes = processes
                arguments |= {"tensor_parallel_size": size, "distributed_executor_backend": "external_launcher"}
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

    def _longest(self) -> int:
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
        report = self._publish(tensors, live.load, version, start)
        report.layers = live.formats()
        self._adapter_active = False
        return report

    def load_adapter(self, tensors: Tensors, version: int) -> PublishReport:
        """Replace the LoRA adapter over an unchanged base; completions use it from then on."""
        start = time.perf_counter()
        if not self.max_lora_rank:
            raise ConfigError(
                "The engine was built without room for an adapter.",
                expected="data.engine.max_lora_rank of at least the policy's rank",
                given=0,
                remedy="Set it, or set publisher.lora to merged.",
            )
        live = self._awake(complete=True)
        if self._adapter is None:
            self._adapter = LiveAdapter(live, self.spec.adapter)
        report = self._publish(tensors, self._adapter.load, version, start)
        self._adapter_active = True
        return report

    def perturb(self, tensors: Tensors, version: int) -> PublishReport:
        """Replace the given norms in place, nothing else."""
        start = time.perf_counter()
        return self._publish(tensors, self._awake(complete=True).replace, version, start)

    def _publish(self, tensors: Tensors, load: Load, version: int, start: float) -> PublishReport:
        ledger = ReceivedLedger(version)
        self._usable = False
        try:
            watchdog = self._watchdog("the publish of one tensor")
            with gc_pause(), blamed(Sender(tensors), version, watchdog) as stream:
                load(stream, ledger)
        except PublishError:
            self._reset_caches()
            raise
        came = None if self._flight is None else self._flight.came(self.llm, version)
        ledger.prefix_reset = self._reset_caches() if came is None else came
        receipts = ledger.receipts()
        self._usable, self._scales_due = True, cache_scales.quantized(self.cache_dtype)
        self.version = version
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
            self.live.clear_kv_cache()
            self._poisoned = False
        if self._routes is not None:
            self._routes.forget()
        return requests.forget_prefixes(self.llm, connector=bool(self._arguments.get("kv_transfer_config")))

    def _awake(self, complete: bool = False) -> LiveModel:
        if self._asleep:
            raise RuntimeError("The engine sleeps: call wake() before publishing.")
        if self.live is None or (complete and not self._usable):
            raise RuntimeError("The engine has no complete weights yet: publish all of them with load_weights() first.")
        return self.live

    def own_part(self, name: str, tensor: Tensor) -> Tensor:
        """Return the part of a sent tensor that this process holds; all of it where the engine has no other."""
        return tensor if self.live is None else self.live.share(name, tensor)

    def read_back(self, name: str) -> Tensor | None:
        """Return the live tensor under its checkpoint name, or None where vLLM repacked the layer."""
        return None if self.live is None else self.live.read_back(name)

    def read_columns(self, layer: str, columns: Sequence[int]) -> Tensor | None:
        """Return columns ("out columns") of a layer's weight as its GEMM multiplies with them, or None if unknown."""
        return None if self.live is None else self.live.read_columns(layer, columns)

    def _watchdog(self, what: str, timeout: float | None = None) -> Watchdog:
        return Watchdog(timeout or self.step_timeout, self.spec.on_hang, what=what)

    # ------------------------------------------------------------------------------------------------------------ end

    def close(self) -> None:
        """Free the engine, its process group if it made one, and its folder."""
        llm, self.llm, self.live, self._adapter, self._routes = self.llm, None, None, None, None
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
