"""A vLLM engine inside the trainer's process that receives low-bit weights in memory and proves that they arrived."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lit_qrl.errors import ConfigError, within_memory
from lit_qrl.formats import support
from lit_qrl.formats.base import NumberFormat
from lit_qrl.functional.logprobs import softmax_logprobs
from lit_qrl.network.linears import quantizable_linears
from lit_qrl.precision.layers.lora_linear import sum_factors
from lit_qrl.precision.vllm_kernels.borrowed import TILE_IN, TILE_OUT, MarlinNVFP4
from lit_qrl.precision.vllm_kernels.exact import drawn_logprobs, flash_attention, product
from lit_qrl.receipts.ledger import PublishError, PublishReport, ReceivedLedger
from lit_qrl.rollout.engine import (
    EngineDiedError,
    EnginePolicy,
    SamplerSpec,
)
from lit_qrl.rollout.vllm import folder, requests, same_kernels
from lit_qrl.rollout.vllm.arguments import llm_arguments
from lit_qrl.rollout.vllm.base import VLLM, Tensors
from lit_qrl.rollout.vllm.checks import (
    check_device_memory,
    check_experts,
    check_groups,
    check_same_format,
)
from lit_qrl.rollout.vllm.errors import blamed, deadly
from lit_qrl.rollout.vllm.installation import check_routes
from lit_qrl.rollout.vllm.live_model import LiveModel
from lit_qrl.rollout.vllm.models import check_model, refused_model
from lit_qrl.rollout.vllm.patches import apply_all
from lit_qrl.rollout.vllm.process import (
    collect_memory,
    kept_process_state,
    own_world,
    prepare_environment,
    shutdown,
    undone_on_failure,
)
from lit_qrl.rollout.vllm.requests import Asked
from lit_qrl.rollout.vllm.upkeep import unlock_workspaces
from lit_qrl.rollout.vllm.watchdog import Watchdog
from lit_qrl.run.console import phase, without_bars
from lit_qrl.run.imports import uncollected

SLEEP_REMEDY = "A sleep of level 1 keeps the weights in memory of the host: set data.engine.sleep_level to 2."
WAKE_REMEDY = "Lower data.engine.gpu_memory_utilization, or set trainer.strategy.offload_optimizer to true"

Load = Callable[[Tensors, int], ReceivedLedger]


class VLLMEngine(VLLM):
    """Draws completions with vLLM, in process, on CPU or GPU; in a run of several processes each has one, or a part.

    The engine starts with random weights in a folder of its own that holds a config alone; the first publish fills it.
    It is built at the first `load_weights`, when the format is known, and holds that format from then on.
    """

    records_kept = True
    routed: requests.Routed | None = None
    format: NumberFormat | None = None
    llm: Any = None
    live: LiveModel | None = None
    lent = False
    _adapter_active = _started = _owns_process_group = _asleep = False

    # -------------------------------------------------------------------------------------------------------- set-up

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

    # ----------------------------------------------------------------------------------------------------- publishing

    def load_weights(self, tensors: Tensors, format: NumberFormat | None, version: int) -> PublishReport:
        """Replace all weights; the report's `received` says what the engine's modules hold.

        Raises:
            PublishError: when a layer came only in part, or vLLM's loader refuses a tensor. The engine then refuses to
                generate until a publish succeeds.
            ValueError: for another format than the engine was built for.
        """
        if self.llm is None:
            self._start(format)
        else:
            check_same_format(format, self.format)
        self._check_awake()

        def load(stream: Tensors, version: int) -> ReceivedLedger:
            self.llm.start_weight_update()
            self.llm.update_weights({"update_info": {"version": version, "tensors": stream}})
            versioned = [str(version)] if hasattr(self.llm, "get_weight_version") else []  # 0.26 keeps none
            self.llm.finish_weight_update(*versioned)
            return self.llm.collective_rpc("update_ledger")[0]

        report = self._publish(tensors, load, version)
        assert self.live is not None
        report.layers = self.live.formats()
        self._adapter_active = False
        return report

    def load_adapter(self, tensors: Tensors, version: int) -> PublishReport:
        """Replace the LoRA adapter over an unchanged base; completions use it from then on."""
        self._check_ready()
        report = self._publish(tensors, self._in_place("replace_adapter", self.spec.adapter), version)
        self._adapter_active = True
        return report

    def perturb(self, tensors: Tensors, version: int) -> PublishReport:
        """Replace the given norms in place, nothing else."""
        self._check_ready()
        return self._publish(tensors, self._in_place("perturb"), version)

    def _in_place(self, what: str, *args: Any) -> Load:
        """Return what has the worker replace tensors where they are."""

        def load(stream: Tensors, version: int) -> ReceivedLedger:
            ledger = ReceivedLedger(version)
            self.llm.collective_rpc(what, args=(stream, ledger, *args))
            return ledger

        return load

    def _publish(self, tensors: Tensors, load: Load, version: int) -> PublishReport:
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
            bytes=ledger.bytes,
            layers=dict.fromkeys(receipts, str(self.plain_dtype).removeprefix("torch.")),
            received=ledger,
        )

    def _reset_caches(self) -> bool:
        if self._poisoned:
            self.llm.collective_rpc("clear_kv_cache")
            self._poisoned = False
        outside = bool(self._arguments.get("kv_transfer_config"))  # prefixes that a connector keeps
        return bool(self.llm.reset_prefix_cache(reset_connector=outside))

    def _check_awake(self) -> None:
        if self._asleep:
            raise RuntimeError("The engine sleeps: call wake() before publishing.")

    def _check_ready(self) -> None:
        self._check_awake()
        super()._check_ready()

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

    def _draw(self, kind: str, more: requests.More, take: Callable[[dict[int, Any]], None]) -> None:
        """Draw from a cache that is sound; an engine that dies of it cannot be used."""
        if self._poisoned:  # it woke, or drew NaN, and no publish came since
            self._reset_caches()

        def read(ended: list[tuple[Asked, Any]]) -> None:
            answers = {one.key: requests.answer(one, output, self.version, self.routed) for one, output in ended}
            take({key: self._noted(answer) for key, answer in answers.items()})

        try:
            with kept_process_state():
                requests.run(self.llm, more, read, self._adapter_active, self._watchdog("one step"))
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

    def discard(self) -> None:
        """Free what a death left; what was drawn before it is kept for the same call to the next engine."""
        kept = self._kept
        self.close()
        self._kept = kept

    def close(self) -> None:
        """Free the engine, its process group if it made one, and its folder."""
        self._kept = (None, {})
        llm, self.llm, self.live = self.llm, None, None
        self._usable = self._asleep = self._adapter_active = False
        if llm is not None:
            shutdown(llm, self._owns_process_group, keep_weights=self.lent)
            del llm
            collect_memory()
        self._remove_folder()
