"""Changes to vLLM's own code without which its numbers are wrong, or no engine starts; and how a change is made.

A change of speed alone, or for the CPU build alone, is one of the plug-in in `packages/vllm_fast`, which vLLM loads by
itself; what is mended by a call in the right moment, and no change, is in `upkeep.py`.
"""

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_qrl.errors import ConfigError
from lit_qrl.formats.kernels.gemm import MANY
from lit_qrl.rollout.vllm import installation, same_kernels

ALL = -1
"""What a request gives as its number of log-probs to get those of the words that it could draw."""
DUMMY = 2.0**-6
"""Every weight and scale before the first publish, exact in all dtypes; a scale's inverse is 64."""
CUMEM = "vllm.device_allocator.cumem"
_MARK = "lit_qrl_original"
_LOADER = "vllm.model_executor.model_loader"


@dataclass(frozen=True)
class Patch:
    """A change to vLLM's code, made once per process.

    A symbol is "module:name" or "module:Class.name", where what an `__init__` or a function sets is a name in it, too.

    Args:
        name: of the change.
        wrong: without it.
        seen: how one sees that.
        changes: from a function of vLLM's to what makes another of it.
        needs: symbols beside those that the change relies on.
        device: that needs it; None for both.
        sources: symbols whose source must be known, with its `digest` in each version that was looked at.
        since: first version that needs it.
        fixed: version that needs it no more; None where none is known.

    >>> old = Patch("locks", "a step hangs", "by a clock", {}, fixed="0.32")
    >>> old.versions, old.concerns((0, 31, 9), "cpu"), old.concerns((0, 32, 0), "cpu")
    ('0.26 to below 0.32', True, False)
    """

    name: str
    wrong: str
    seen: str
    changes: Mapping[str, Callable[[Any], Any]]
    needs: Sequence[str] = ()
    device: Literal["cpu", "cuda"] | None = None
    sources: Mapping[str, Sequence[str]] = field(default_factory=dict)
    since: str = "0.26"
    fixed: str | None = None

    @property
    def versions(self) -> str:
        """Which need it, in words."""
        return f"from {self.since}" if self.fixed is None else f"{self.since} to below {self.fixed}"

    def concerns(self, version: Sequence[int], device: str) -> bool:
        """Return True where this vLLM needs the change."""
        first, end = (tuple(map(int, one.split("."))) if one else () for one in (self.since, self.fixed))
        begun = first <= tuple(version) or not any(version)  # one that does not say its version may need all
        return begun and (not end or tuple(version) < end) and self.device in (None, device)

    def misfit(self) -> str | None:
        """Return what of the installed vLLM is not there, or not as it was looked at; None where all fits."""
        for symbol in (*self.changes, *self.needs, *self.sources):
            try:
                find(symbol)
                found = digest(symbol) if symbol in self.sources else None
            except Exception as error:  # of a module of vLLM's that cannot be imported here, too
                return f"{symbol.replace(':', '.')} is not there ({error})"
            if found is not None and found not in self.sources[symbol]:
                return f"{symbol.replace(':', '.')} is of another source ({found})"
        for symbol, changed in self.changes.items():
            original = getattr(*find(symbol))
            original = getattr(original, _MARK, original)
            if not takes_as_many(changed(original), original):
                return f"{symbol.replace(':', '.')} takes other arguments {inspect.signature(original)}"
        return None

    def make(self) -> None:
        """Make the change, once."""
        for symbol, changed in self.changes.items():
            replace(symbol, changed)


def find(symbol: str) -> tuple[Any, str]:
    """Return where the last name of a symbol is, and that name.

    Raises:
        ImportError, AttributeError: when it is not there.

    >>> owner, name = find("collections:OrderedDict.pop")
    >>> owner.__name__, name
    ('OrderedDict', 'pop')
    """
    module, _, path = symbol.partition(":")
    owner: Any = None
    found: Any = import_module(module)
    name = ""
    for name in path.split("."):
        owner = getattr(found, _MARK, found)
        code = getattr(owner.__init__ if isinstance(owner, type) else owner, "__code__", None)
        if not hasattr(owner, name) and name not in getattr(code, "co_names", ()):
            raise AttributeError(f"{getattr(owner, '__name__', owner)} has no {name}")
        found = getattr(owner, name, None)
    return owner, name


def digest(symbol: str) -> str:
    """Return a short hash of a function's source, in which spaces and its docstring do not count.

    >>> digest("lit_qrl.rollout.vllm.patches:find") == digest("lit_qrl.rollout.vllm.patches:digest")
    False
    """
    owner, name = find(symbol)
    function = getattr(owner, name)
    function = getattr(function, _MARK, function)
    source = "".join(inspect.getsource(function).split())
    return hashlib.sha256(source.replace("".join((function.__doc__ or "").split()), "").encode()).hexdigest()[:8]


def takes_as_many(made: Callable[..., Any], original: Callable[..., Any]) -> bool:
    """Return whether a function can be called with the positional arguments of the one whose place it takes.

    >>> takes_as_many(lambda x, *more: x, lambda x, y, z=0: x), takes_as_many(lambda x: x, lambda x, y: x)
    (True, False)
    """
    placed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ours, theirs = (list(inspect.signature(one).parameters.values()) for one in (made, original))
    given, taken = ([one for one in each if one.kind in placed] for each in (theirs, ours))
    any_given, any_taken = (any(one.kind is one.VAR_POSITIONAL for one in each) for each in (theirs, ours))
    needed = sum(one.default is one.empty for one in taken)
    return any_given or (needed <= len(given) and (any_taken or len(given) <= len(taken)))


def replace(symbol: str, changed: Callable[[Any], Any]) -> None:
    """Put `changed(original)` in the place of a function of a module or class, once."""
    owner, name = find(symbol)
    original = getattr(owner, name)
    if not hasattr(original, _MARK):
        made = changed(original)
        setattr(made, _MARK, original)
        static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(made) if static else made)


def apply_all() -> None:
    """Make every change that the installed vLLM needs here; call before an engine is built.

    Raises:
        ConfigError: for a change that does not fit a version that is not known to do without it, and on a CPU where
            vLLM would not load the plug-in that mends its CPU build.
    """
    found = installation.installed_version()
    if found is None:
        return
    version, device = found[0], "cuda" if torch.cuda.is_available() else "cpu"
    for patch in PATCHES:
        if patch.concerns(version, device):
            apply(patch, version)
    installation.check_plugin(device)


def apply(patch: Patch, version: Sequence[int]) -> None:
    """Make one change.

    Raises:
        ConfigError: where something that it changes or relies on is not there; nothing is changed then.
    """
    misfit = patch.misfit()
    if misfit is not None:
        raise ConfigError(
            f"The patch {patch.name} does not fit the installed vLLM: {misfit}. Without it {patch.wrong}.",
            expected=installation.accepted(),
            given=f"vLLM {'.'.join(map(str, version))}",
            remedy="Install one that was run, take TransformersEngine, or mend it in lit_qrl/rollout/vllm/patches.py.",
        )
    patch.make()


# ---------------------------------------------------------------------------------------------------- the changes


def on_the_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `_compute_inv_freq`, which computes on the CPU, as transformers does, and moves what it found.

    >>> on_the_cpu(lambda rotary, base: torch.tensor([base]))(None, 1e4).device.type
    'cpu'
    """

    def frequencies(*args: Any, **named: Any) -> Tensor:
        device = torch.get_default_device()
        with torch.device("cpu"):
            found = original(*args, **named)
        return found.to(device)

    return frequencies


def in_one_piece(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what plans FlashAttention's work, which adds over a sequence's keys in one piece for `same_kernels`."""

    def build(*args: Any, **named: Any) -> Any:
        plan = original(*args, **named)
        if same_kernels.active():
            plan.max_num_splits, plan.scheduler_metadata = 1, None
            plan.max_query_len = max(plan.max_query_len, MANY)
        return plan

    return build


def of_many_rows(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `cutlass_scaled_mm`, which gives few rows the bits that many would have, for `same_kernels`."""

    def multiply(a: Tensor, b: Tensor, scale_a: Tensor, *args: Any, **named: Any) -> Tensor:
        m = len(a)
        if not same_kernels.active() or not 0 < m < MANY or scale_a.numel() != m:
            return original(a, b, scale_a, *args, **named)
        rows, scales = a.new_empty((MANY, a.shape[1])), scale_a.new_empty((MANY, 1))
        rows.view(torch.uint8)[:m] = a.view(torch.uint8)
        scales[:m] = scale_a.view(m, 1)
        return original(rows, b, scales, *args, **named)[:m]

    return multiply


def in_one_order(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the product of a plain layer, by a kernel that adds in one order for any rows under `batch_invariant`."""

    def apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if not same_kernels.exact():
            return original(self, layer, x, bias)
        from lit_qrl.precision.vllm_kernels import exact  # which brings transformers

        return exact.product(x, layer.weight, bias)

    return apply


def term_in_one_order(original: Callable[..., None]) -> Callable[..., None]:
    """Return what adds the one adapter's term to products, part by part as the learner does under `batch_invariant`."""

    def add(self: Any, y: Tensor, x: Tensor, a: Any, b: Any, scale: float, sizes: Sequence[int], **named: Any) -> None:
        if not same_kernels.exact():
            original(self, y, x, a, b, scale, sizes, **named)
            return
        from lit_qrl.precision.vllm_kernels import exact  # which brings transformers

        # q, k and v, or gate and up, read the same rows: a column of a product has the same bits beside any others
        factors = [one[0, 0] for one in a]
        whole = torch.cat(factors) if len(factors) > 1 else factors[0]
        downs = exact.product(x, whole, None).split([len(one) for one in factors], dim=-1)
        for part, down, up in zip(y.split(list(sizes), dim=-1), downs, b, strict=True):
            part.add_(exact.product(down, up[0, 0], None))

    return add


@torch.no_grad()
def fill(param: Tensor, *args: Any, **named: Any) -> None:
    """Fill a parameter before the first publish, integers with zeros.

    >>> fill(codes := torch.ones(2, dtype=torch.uint8)); fill(scale := torch.zeros(2, dtype=torch.float8_e4m3fn))
    >>> codes.tolist(), scale.tolist()
    ([0, 0], [0.015625, 0.015625])
    """
    if param.device.type != "meta":  # those are filled when they get memory
        param.data.fill_(DUMMY if param.is_floating_point() else 0)


def of_those_left(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `gather_logprobs`, which takes a request for `ALL` as one for the most words that a row has left."""

    def gather(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        if num_logprobs >= logprobs.shape[-1]:
            left = (logprobs > float("-inf")).sum(dim=-1)
            num_logprobs = max(int(left.max()), 1) if len(left) else 1
        return original(logprobs, num_logprobs, token_ids)

    return gather


def for_engines_alone(original: Any) -> Any:
    """Return vLLM's decorator of classes, whose methods act on models alone that vLLM builds."""

    def support(cls: type, *args: Any, **named: Any) -> type:
        from transformers import PreTrainedModel
        from vllm.config import get_current_vllm_config_or_none

        init, call = cls.__init__, cls.__call__
        made = original(cls, *args, **named)
        theirs_init, theirs_call = cls.__init__, cls.__call__
        if not issubclass(cls, PreTrainedModel) or theirs_call is call:  # or changed before
            return made

        @wraps(init)
        def construct(self: Any, *args: Any, **named: Any) -> None:
            building = get_current_vllm_config_or_none() is not None
            (theirs_init if building else init)(self, *args, **named)

        @wraps(call)
        def run(self: Any, *args: Any, **named: Any) -> Any:
            return (theirs_call if "do_not_compile" in vars(self) else call)(self, *args, **named)

        cls.__init__, cls.__call__ = construct, run
        return made

    return support


workspaces: dict[tuple[Any, ...], Tensor] = {}
"""Marlin's lock memory by device and size: every layer has the same, before and after a reload."""


def shared_workspace(original: Any) -> Any:
    """Return the function that makes lock memory, once per device and size."""

    def make(device: torch.device, max_blocks_per_sm: int = 1, existing: Tensor | None = None) -> Tensor:
        # `existing`, which vLLM names at a reload, is what is there already
        key = str(device), max_blocks_per_sm
        if key not in workspaces:
            workspaces[key] = original(device, max_blocks_per_sm)
        return workspaces[key]

    return make


def declare(model: nn.Module) -> None:
    """Declare as None what the loader of a layer fills and the layer does not have."""
    from lit_qrl.rollout.vllm.locations import checkpoint_names

    for module in model.modules():
        if hasattr(module, "quant_method"):
            for name in checkpoint_names(module):
                if not hasattr(module, name):
                    module.register_parameter(name, None)


def declaring(original: Any) -> Any:
    """Return the end of a reload, after which `declare` is called."""

    def finalize(model: nn.Module, *args: Any, **options: Any) -> None:
        original(model, *args, **options)
        declare(model)

    return finalize


def mapped_first(original: Any) -> Any:
    """Return the allocator's function that frees a piece, which then gives one that sleeps memory for the moment."""

    def free(allocator: Any, pointer: int) -> Any:
        data = allocator.pointer_to_data.get(pointer)
        if data is not None and data.is_asleep:
            import_module(CUMEM).create_and_map(data.handle)
            data.is_asleep = False
        return original(allocator, pointer)

    return free


def without_adapter(original: Any) -> Any:
    """Return the end of the constructor of experts' config, which then says that they have no adapter."""

    def finish(config: Any) -> None:
        original(config)
        config.is_lora_enabled = False

    return finish


_LAYERS = "vllm.model_executor.layers"
_EXPERTS = "vllm.model_executor.layers.fused_moe.config:FusedMoEConfig"
_FLASH = "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadata"
_UTILS = "vllm.model_executor.layers.quantization.utils.marlin_utils"
PATCHES = (
    Patch(
        "rows_alone",
        "the bits of a row depend on how many are beside it: FlashAttention adds a sequence's keys in as many pieces "
        "as multiprocessors are free, and in other tiles for at most 64 queries; CUTLASS multiplies at most 64 rows of "
        "FP8 as the transposed product, and applies their scales in another order",
        "same_kernels: true has a KL of 4e-3 to the learner, or of 1e-4 once at most 64 sequences are left",
        {
            f"{_FLASH}Builder.build": in_one_piece,
            "vllm._custom_ops:cutlass_scaled_mm": of_many_rows,
            f"{_LAYERS}.linear:UnquantizedLinearMethod.apply": in_one_order,
            f"{_LAYERS}.vocab_parallel_embedding:UnquantizedEmbeddingMethod.apply": in_one_order,
            "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU.add_lora_linear": term_in_one_order,
        },
        [f"{_FLASH}.max_num_splits", f"{_FLASH}.scheduler_metadata", f"{_FLASH}.max_query_len"],
        device="cuda",
    ),
    Patch(
        "dummy_weights",
        "what an engine warms up with is random numbers and memory as it was found: a global scale of NVFP4 near zero "
        "makes logits NaN, and the token drawn from them lies outside of the vocabulary",
        "a device-side assert before the first publish, after which the process has lost the device",
        {
            f"{_LOADER}.{name}:initialize_single_dummy_weight": lambda original: fill
            for name in ("dummy_loader", "weight_utils")
        },
    ),
    Patch(
        "kept_tokens",
        "the first model runner gives log-probs of all 150,000 words, or of the k likeliest, not of those that "
        "top_p and top_k left; its own mask of those is the second runner's, which cannot draw greedily or score then",
        "corrections under top_p or top_k have no kept set",
        {"vllm.v1.sample.sampler:Sampler.gather_logprobs": of_those_left},
        ["vllm.logprobs:FlatLogprobs.start_indices"],
    ),
    Patch(
        "learner_classes",
        "vLLM changes a class of transformers for torch.compile, where it has no code of its own for an architecture; "
        "the learner's model is of that class in the same process",
        "AttributeError: 'Olmo2Model' object has no attribute 'do_not_compile' in the learner's forward pass",
        {"vllm.compilation.decorators:_support_torch_compile": for_engines_alone},
        ["vllm.config:get_current_vllm_config_or_none"],
    ),
    Patch(
        "marlin_workspaces",
        "Marlin's lock memory is allocated anew in each reload, while CUDA graphs go on using the freed one",
        "decoding in 4 bits hangs some steps after a publish",
        {
            f"{module}:marlin_make_workspace_new": shared_workspace
            for module in (
                _UTILS,
                f"{_UTILS}_fp4",
                f"{_UTILS}_fp8",
                "vllm.model_executor.kernels.linear.mixed_precision.marlin",
            )
        },
        fixed="0.32",  # its #48438
    ),
    Patch(
        "process_group",
        "the end of an engine ends torch's default process group, which joins the trainer's processes",
        "the next collective of a run on several devices fails after an engine was built anew",
        # `shutdown` ends what the engine has made
        {"vllm.v1.engine.core:cleanup_dist_env_and_memory": lambda original: lambda *args, **options: None},
    ),
    Patch(
        "released_parameters",
        "a reload does not declare again what the packing of a layer had released, in layers that got nothing",
        "AttributeError of a layer's method, which asks whether that parameter is None",
        {f"{_LOADER}.reload:finalize_layerwise_reload": declaring},
        [f"{_LOADER}.reload.layerwise:get_layerwise_info"],
    ),
    Patch(
        "rotary_frequencies",
        "the frequencies of rotary positions are computed on the GPU, whose powers have other last bits than the "
        "CPU's, by which transformers computes them: angles of distant tokens differ",
        "cosines of the engine's cache are not those of the learner's rotary embedding",
        {"vllm.model_executor.layers.rotary_embedding.base:RotaryEmbeddingBase._compute_inv_freq": on_the_cpu},
        device="cuda",
    ),
    Patch(
        "sleeping_memory",
        "memory of an engine that is closed in its sleep is unmapped a second time",
        "the driver's refusal is raised in the next engine's first allocation",
        {f"{CUMEM}:CuMemAllocator._python_free_callback": mapped_first},
        [f"{CUMEM}:CuMemAllocator.pointer_to_data", f"{CUMEM}:AllocationData.is_asleep", f"{CUMEM}:create_and_map"],
        device="cuda",
    ),
    Patch(
        "unadapted_experts",
        "an engine with room for an adapter takes kernels for experts that multiply adapters of experts, too, which "
        "ours never have: none is there on a CPU, and formats lose theirs on a GPU",
        "the engine of a mixture does not start with max_lora_rank on a CPU",
        {f"{_EXPERTS}.__post_init__": without_adapter},
        [f"{_EXPERTS}.is_lora_enabled"],
    ),
)
"""Every one; at most ten, where the same change of symbols that got other names counts once."""
