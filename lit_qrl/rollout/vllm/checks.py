"""What is checked before a vLLM engine is built, with numbers and a remedy."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lit_qrl.errors import ConfigError, listed
from lit_qrl.formats import support
from lit_qrl.formats.base import NumberFormat
from lit_qrl.network.experts import expert_stacks
from lit_qrl.network.linears import fused_group, fused_groups, quantizable_linears
from lit_qrl.network.names import base_of, checkpoint_modules
from lit_qrl.network.routing import routers
from lit_qrl.network.shards import own
from lit_qrl.rollout.vllm import cpu as vllm_cpu

GIB = 2**30
PARALLEL = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    "nnodes",
)
"""Arguments of vLLM that spread an engine over processes; all are 1 where it does not."""
# LoRA kernels are compiled for these ranks.
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def automatic_dtype(format: NumberFormat | None, learner: torch.dtype) -> torch.dtype:
    """Return the engine's dtype: the format's or the learner's own, bf16 where kernels take nothing else.

    >>> from lit_qrl import formats
    >>> automatic_dtype(formats.get("bf16"), torch.float32), automatic_dtype(None, torch.float32)
    (torch.bfloat16, torch.float32)
    """
    if format is None or not format.quantization_config():
        return getattr(format, "dtype", learner)
    takes_float32 = support.device_here() not in support.row_of(format).vllm_half_only
    return learner if takes_float32 or learner != torch.float32 else torch.bfloat16


def check_format(format: NumberFormat | None, head: bool = False) -> None:
    """Raise `ConfigError` for a format that vLLM has no kernel for on this host.

    Args:
        format: of the sampler's linear layers.
        head: True when the output head is in it too.
    """
    if format is None:
        return
    device, row = support.device_here(), support.row_of(format)
    # Below 8.9 vLLM multiplies FP8 weights by activations that it leaves alone, which is another format.
    remedy = "Choose int8_channel or int4_group, or use TransformersEngine, which emulates it."
    support.require_fp8("VLLMEngine", format, torch.device(device), remedy)
    known = sorted(support.names_where(lambda one: device in one.vllm))
    if format.name not in known:
        raise ConfigError(
            f"vLLM{f' on {device.upper()}' if row.vllm else ''} has no kernel for publisher.format {format.name}.",
            expected=", ".join(known),
            given=format.name,
            remedy="Choose one of these, or use TransformersEngine, which computes every format.",
        )
    bits = int(format.bits_per_weight)
    if device not in row.vllm:  # as its activations are set
        raise ConfigError(
            f"vLLM on {device.upper()} has no kernel for {bits}-bit weights under 8-bit activations.",
            expected=f"{format.name}.activations: null",
            remedy="Leave the activations alone, or use TransformersEngine.",
        )
    if device == "cuda" and row.vllm_gpu is not None and not row.vllm_gpu.met(torch.device(device)):
        activations = str(getattr(format, "activations", None)).upper()
        raise ConfigError(
            f"VLLMEngine multiplies {bits}-bit weights by {activations} activations, for which vLLM has no kernel on "
            "this GPU.",
            expected=str(row.vllm_gpu),
            given=row.vllm_gpu.given(torch.device(device)),
            remedy=f"Set {format.name}.activations to null, or use TransformersEngine, which emulates it.",
        )
    if head and not row.vllm_head:
        raise ConfigError(
            f"vLLM does not load an output head in {format.name}.",
            expected=", ".join(name for name in known if support.TABLE[name].vllm_head),
            given="publisher.quantize_head: true",
            remedy="Choose one of these, leave the head as it is, or use TransformersEngine.",
        )


def check_same_format(given: NumberFormat | None, held: NumberFormat | None) -> None:
    """Raise `ValueError` for another format than the engine was built for."""
    if ((given and given.quantization_config()) or {}) != ((held and held.quantization_config()) or {}):
        expected, found = ("plain weights" if one is None else one.name for one in (held, given))
        raise ValueError(
            f"A vLLM engine holds one format. Expected: {expected}. Given: {found}. "
            "Publish evaluations in the rollout format, or use TransformersEngine."
        )


def check_groups(format: NumberFormat | None, held: Mapping[str, Sequence[str]]) -> None:
    """Raise `ConfigError` where vLLM multiplies layers as one that got a scale each.

    Args:
        format: of the layers.
        held: names of the checkpoint's layers by the module of vLLM's that holds them.
    """
    if format is None or not format.shares_amax:
        return
    for module, layers in held.items():
        if len({fused_group(layer) for layer in layers}) > 1:
            raise ConfigError(
                f"vLLM multiplies {', '.join(layers)} as one layer, and {format.name} would give each a scale.",
                expected="layers that share one scale there and here",
                given=f"{module}, which no row of FUSED_LAYERS (lit_qrl/network/structure.py) names",
                remedy="Add the row, set publisher.format to fp8_row or int4_group, or use TransformersEngine.",
            )


def check_operators(format: NumberFormat | None) -> None:
    """Raise `ConfigError` for a format whose operator the CPU build of vLLM lacks on this host, or computes wrongly."""
    if format is None or torch.cuda.is_available():
        return
    missing = vllm_cpu.missing_operators(support.row_of(format).vllm_cpu_operators)
    if missing:
        raise ConfigError(
            f"The CPU build of vLLM that this host loads has no operator for publisher.format {format.name}.",
            expected=f"torch.ops._C.{', '.join(missing)}, which is in vLLM's build for AVX-512",
            given=f"a build without it ({torch.backends.cpu.get_cpu_capability()})",
            remedy="Choose a format that multiplies without it, such as fp8_row, or use TransformersEngine.",
        )
    if format.name == "int8_channel":
        got, exact = vllm_cpu.int8_product()
        if abs(got - exact) > 1e-5 * exact:
            raise ConfigError(
                "vLLM's INT8 GEMM overflows on this CPU: without VNNI instructions it adds products in 16 bits.",
                expected=f"{exact:.0f} for a product of the largest codes",
                given=f"{got:.0f}",
                remedy="Choose another format, such as fp8_row, or use TransformersEngine, which computes it exactly.",
            )


def check_arguments(gpu_memory_utilization: float, max_num_seqs: int, max_lora_rank: int, request_seeds: bool) -> None:
    """Raise `ConfigError` for arguments of `VLLMEngine` that are out of range."""
    ranks = f"0 or one of {', '.join(map(str, LORA_RANKS))}, which hold adapters of lower ranks too"
    for taken, key, expected, given in (
        (0 < gpu_memory_utilization <= 1, "gpu_memory_utilization", "a share in (0, 1]", gpu_memory_utilization),
        (max_num_seqs >= 1, "max_num_seqs", "at least 1", max_num_seqs),
        (request_seeds, "request_seeds", "true, the only one", request_seeds),
        (max_lora_rank in (0, *LORA_RANKS), "max_lora_rank", ranks, max_lora_rank),
    ):
        if not taken:
            raise ConfigError(f"data.engine.{key} is out of range.", expected=expected, given=given)


def check_unverified(arguments: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for arguments of `vllm.LLM` under which log-probs were never verified to be the sampler's.

    vLLM gives an FP8 cache of keys and values scales of 1, whatever weights come, and its CPU build scales logits of
    proposed tokens by memory that was never written.
    """
    for name in ("kv_cache_dtype", "speculative_config"):
        if arguments.get(name) not in (None, "auto"):
            raise ConfigError(
                f"What VLLMEngine draws under {name} was never verified.",
                expected="data.engine without it, also in engine_args",
                given=str(arguments[name]),
                remedy="Leave it out; TransformersEngine has the numbers of an FP8 cache (kv_cache_dtype: fp8).",
            )


def check_length(limit: int | None, prompt: int, completion: int, sequence: int = 0) -> None:
    """Raise `ConfigError` when the longest sequence of the run exceeds the engine's `limit`, all in tokens.

    Args:
        limit: of the engine; None takes what the run needs.
        prompt: the longest of rollouts.
        completion: the longest of rollouts.
        sequence: the longest prompt and completion together of evaluations.
    """
    prompt = max(prompt, sequence - completion)
    if limit is not None and limit < prompt + completion:
        raise ConfigError(
            "data.engine.max_model_len is shorter than a prompt and its completion.",
            expected=f"at least {prompt + completion} ({prompt} + {completion} tokens)",
            given=limit,
            remedy="Raise it, or leave it null for that sum.",
        )


def check_processes(arguments: Mapping[str, Any]) -> None:
    """Raise `ConfigError` where vLLM would run several processes: the engine lives in this one alone.

    Args:
        arguments: of `vllm.LLM`, those of `data.engine.engine_args` among them.
    """
    executor = arguments.get("distributed_executor_backend")
    spread = {name: arguments[name] for name in PARALLEL if (arguments.get(name) or 1) != 1}
    if executor not in (None, "uni"):
        spread["distributed_executor_backend"] = executor if isinstance(executor, str) else executor.__name__
    if spread:
        raise ConfigError(
            "VLLMEngine runs in the trainer's processes, on one device each, and weights go into their memory.",
            expected=f"{', '.join(spread)} left out of data.engine.engine_args",
            given=", ".join(f"{name}: {value}" for name, value in spread.items()),
            remedy="For a model that is too large for one device, publish in fewer bits (publisher.format), let the "
            "engine take turns with the learner (configs/engine/vllm_colocated.yaml), or make one of the engines of "
            "several of the learner's processes (data.engine.tensor_parallel_size).",
        )


def check_device_memory(network: nn.Module, bits_per_weight: float, share: float, sleeps: bool = False) -> None:
    """Raise `ConfigError` when the GPU cannot hold engine and learner, with how much each takes.

    Args:
        network: the learner's model, already in memory.
        bits_per_weight: of the sampler's format.
        share: the part of the GPU's memory that the engine asks for.
        sleeps: True when the engine gives its memory back before the learner's gradients are made.
    """
    free, total = torch.cuda.mem_get_info()
    asked = share * total
    weights = sum(p.numel() for p in network.parameters()) * bits_per_weight / 8
    learner = torch.cuda.memory_allocated()
    # Every optimizer needs the gradients; its own state depends on which it is, and is not counted.
    trained = (own(p) for p in network.parameters() if p.requires_grad)
    gradients = sum(p.numel() * p.element_size() for p in trained)
    beside = 0 if sleeps else gradients
    # What the learner's allocator keeps for itself can be used again for the gradients.
    spare = max(torch.cuda.memory_reserved() - learner, 0)
    if asked + max(beside - spare, 0) > free:
        fits = max(free - max(beside - spare, 0), 0) / total * 0.98
        colocated = "" if sleeps else ", or let the engine sleep during the update (configs/engine/vllm_colocated.yaml)"
        raise ConfigError(
            "The GPU has not enough memory for the engine beside the learner.",
            expected=f"{(asked + beside) / GIB:.1f} GiB free: {asked / GIB:.1f} for data.engine.gpu_memory_utilization "
            f"{share:g} and {beside / GIB:.1f} for the learner's gradients",
            given=f"{free / GIB:.1f} of {total / GIB:.1f} GiB free; the learner holds {learner / GIB:.1f} GiB",
            remedy=f"Lower it to at most {fits:.2f} (the sampler's weights take {weights / GIB:.1f} GiB of that)"
            f"{colocated}. AdamW's state in the parameters' dtype takes another {2 * gradients / GIB:.1f} GiB.",
        )


def check_experts(network: nn.Module, format: NumberFormat | None, exclude: Collection[str]) -> None:
    """Raise `ConfigError` for experts in a format of 8 bits or less that vLLM has no kernel for on this host.

    Args:
        network: the learner's model.
        format: of the sampler's layers.
        exclude: name patterns of the publisher.
    """
    stacks = expert_stacks(network, exclude) if format is not None and format.quantization_config() else {}
    if format is None or not stacks:
        return
    device = support.device_here()
    known = support.names_where(lambda row: device in row.vllm_experts)
    stacked = [name for name, stack in stacks.items() if not stack.apart]
    if device not in support.row_of(format).vllm_experts or stacked:
        others = f", or {', '.join(known)}" if known and not stacked else ""
        raise ConfigError(
            f"VLLMEngine is not sent experts in {format.name}.",
            expected=f"publisher.format: bf16{others}, or '*.experts' in publisher.exclude, which leaves them plain",
            given=f"{listed(stacked or stacks, 2)} on {device.upper()}",
            remedy="Set one of them, or use TransformersEngine, which holds experts in every format.",
        )


def plain_mixtures(network: nn.Module, exclude: Collection[str]) -> list[str]:
    """Return the routers, and the experts that stay plain, as a `quantization_config` lists them: names, and patterns.

    vLLM makes layers of them that a config for linear layers counts in, under names that differ by family.

    Args:
        network: the learner's model.
        exclude: name patterns of the publisher.
    """
    names = [router.name for router in routers(network)]
    found = [(name, rf"\.{name.rpartition('.')[2]}$") for name in names]
    quantized = expert_stacks(network, exclude)
    found += [(name, r"\.experts\..*") for name in expert_stacks(network) if name not in quantized]
    numbered = [(re.search(r"layers\.\d+\.", name), end) for name, end in found]
    return names + [f"re:.*{re.escape(layer[0])}[^.]+{end}" for layer, end in numbered if layer]


def plain_layers(network: nn.Module, exclude: Collection[str], head: bool = False) -> list[str]:
    """Return the linear layers that stay unquantized, as a `quantization_config` lists them.

    Args:
        network: the learner's model.
        exclude: name patterns of the publisher.
        head: True when the output head is quantized too.

    Raises:
        ConfigError: when only a part of the layers that vLLM fuses is excluded.
    """
    quantized = set(quantizable_linears(network, exclude, head))
    linears = [name for name, module in checkpoint_modules(network) if isinstance(base_of(module), nn.Linear)]
    for fused, members in fused_groups(linears).items():
        inside = [name for name in members if name in quantized]
        if inside and len(inside) < len(members):
            raise ConfigError(
                f"publisher.exclude splits {fused}, which vLLM holds as one layer.",
                expected=f"all or none of {', '.join(members)}",
                given=f"{', '.join(inside)} quantized",
                remedy="Exclude the whole group.",
            )
    plain = [name for name in linears if name not in quantized] + plain_mixtures(network, exclude)
    return plain if "lm_head" in plain or "lm_head" in quantized else [*plain, "lm_head"]
