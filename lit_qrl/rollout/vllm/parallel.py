"""One engine over several processes, each with a part of every matrix: what it can be, which part, and equal requests.

vLLM calls it tensor parallelism with an external launcher: each process has a whole engine of which the layers hold a
part, and all of them must be asked the same in the same order.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, distributed, nn

from lit_qrl.errors import ConfigError, listed
from lit_qrl.formats.base import NumberFormat
from lit_qrl.network.experts import expert_stacks
from lit_qrl.rollout.engine import SamplerSpec
from lit_qrl.rollout.vllm.locations import ExpertPlace, Place
from lit_qrl.rollout.vllm.models import latent, recurrent

Joined = tuple[list[Sequence[int]], list[int], slice]
"""The prompts of all processes, the number of each, and which are this process's."""


def check(size: int, spec: SamplerSpec, settings: dict[str, Any]) -> None:
    """Raise `ConfigError` where an engine cannot be several of the learner's processes.

    Args:
        size: `data.engine.tensor_parallel_size`.
        spec: of the sampler.
        settings: of the engine, those that need a whole one: name and value.
    """
    if size < 1:
        raise ConfigError("data.engine.tensor_parallel_size is too small.", expected="at least 1", given=size)
    if size == 1:
        return
    local, whole = spec.learners.local[1], spec.learners.whole[1]
    if whole % size or local % size:
        raise ConfigError(
            f"data.engine.tensor_parallel_size {size} makes one engine of {size} processes of the learner on one host.",
            expected=f"a multiple of {size} processes on each host (trainer.devices)",
            given=f"{local} of {whole}",
            remedy="Set trainer.devices and trainer.strategy, or lower tensor_parallel_size.",
        )
    used = [f"{name}: {value}" for name, value in settings.items() if value]
    if spec.adapter is not None:
        used.append("publisher.lora: adapter")
    if spec.routes:
        used.append("RouterReplay")
    if used:
        raise ConfigError(
            "An engine of several processes holds a part of each matrix in each, which is not known to work with all.",
            expected="data.engine.tensor_parallel_size: 1",
            given=listed(used, 3),
            remedy="Leave one of them out.",
        )


def check_model(network: nn.Module, size: int, format: NumberFormat | None = None) -> None:
    """Raise `ConfigError` for a model whose matrices cannot be cut into so many equal parts.

    Args:
        network: the learner's model, with or without weights.
        size: parts.
        format: of the sampler's linear layers.
    """
    if size == 1:
        return
    config: Any = network.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    name = type(network).__name__
    if expert_stacks(network) or latent(config) or recurrent(name):
        raise ConfigError(
            f"{name} has layers of which an engine of several processes cannot prove what it holds.",
            expected="a dense decoder with attention layers",
            given=f"data.engine.tensor_parallel_size: {size}",
            remedy="Set it to 1, and publish in fewer bits where the model is too large for one GPU.",
        )
    heads = int(getattr(text, "num_attention_heads", size))
    groups = int(getattr(text, "num_key_value_heads", None) or heads)
    inner = int(getattr(text, "intermediate_size", None) or size)
    if heads % size or (groups % size and size % groups) or inner % size:
        raise ConfigError(
            f"data.engine.tensor_parallel_size does not divide the heads and layers of {name}.",
            expected="a divisor of the attention heads and of the intermediate size, and a divisor or a multiple of "
            "the key-value heads",
            given=f"{size}, with {heads} heads, {groups} key-value heads and an intermediate size of {inner}",
            remedy="Choose another number.",
        )
    block = getattr(format, "group_size", None) or getattr(format, "block_size", None)
    if isinstance(block, int) and inner // size % block:
        raise ConfigError(
            f"data.engine.tensor_parallel_size cuts through groups of {block} weights that share a scale.",
            expected=f"an intermediate size of which a share is a multiple of {block}",
            given=f"{inner} / {size}",
            remedy="Choose another number, a smaller group_size, or fp8_row.",
        )


def own_part(place: Place, tensor: Tensor) -> Tensor:
    """Return the part of a whole tensor that this process's module holds, as vLLM's loaders cut it: a view.

    Rows of layers whose outputs are divided (q, k, v, gate, up; a key-value head may be held by several), columns of
    those whose inputs are (o, down), rows of embeddings and of the output head; numbers for a whole layer, norms, and
    what is added to sums are held by each.

    Args:
        place: where the tensor goes.
        tensor: as a checkpoint has it.
    """
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

    module: Any = place.module
    if hasattr(module, "shard_indices"):
        own = module.shard_indices
        return tensor[own.org_vocab_start_index : own.org_vocab_end_index] if tensor.ndim else tensor
    size, rank = int(getattr(module, "tp_size", 1)), int(getattr(module, "tp_rank", 0))
    if size == 1 or not isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
        return tensor
    if place.rewritten or place.groups or len(place.shards) > 1 or isinstance(place, ExpertPlace):
        raise ConfigError(
            f"The part of {place.module_name} that a process holds is not known: its checkpoint fuses it in a way of "
            "its own.",
            expected="data.engine.tensor_parallel_size: 1",
            given=size,
            remedy="Set it to 1.",
        )
    axis = 0 if isinstance(module, ColumnParallelLinear) else 1
    replicas = int(getattr(module, "num_kv_head_replicas", 1))
    if axis == 0 and place.part in (1, 2):
        rank, size = rank // replicas, size // replicas
    if tensor.ndim <= axis or tensor.shape[axis] == 1:  # one number for the layer, or for each of its outputs
        return tensor
    if place.turned and tensor.ndim == 2:
        axis = 1 - axis
    if tensor.shape[axis] % size:
        raise ConfigError(
            f"{place.module_name}.{place.attribute} cannot be cut into {size} equal parts.",
            expected=f"a multiple of {size} along its axis {axis}",
            given=f"{tuple(tensor.shape)}",
            remedy="Choose another data.engine.tensor_parallel_size, or another publisher.format.",
        )
    return tensor.tensor_split(size, dim=axis)[rank]


def joined(prompts: Sequence[Sequence[int]], numbers: Sequence[int], call: Any, group: Any) -> Joined:
    """Return what all processes of an engine ask of it, which each of them then does in the same order.

    Args:
        prompts: of this process.
        numbers: of its prompts, from which their randomness comes.
        call: the rest of the request, alike in all processes.
        group: of the engine's processes; None where it is one.

    Raises:
        RuntimeError: where the processes ask for different things.
    """
    if group is None:
        return list(prompts), list(numbers), slice(0, len(prompts))
    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, (list(map(list, prompts)), list(numbers), call), group=group)
    if any(other != call for _, _, other in found):
        raise RuntimeError(f"The processes of one engine ask for different things: {[other for *_, other in found]}.")
    rank = distributed.get_rank(group)
    first = sum(len(theirs) for theirs, _, _ in found[:rank])
    everything = [prompt for theirs, _, _ in found for prompt in theirs]
    return everything, [number for _, own, _ in found for number in own], slice(first, first + len(prompts))
