"""A plain checkpoint becomes one in a format of 4 or 8 bits, one decoder layer at a time."""

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from lit_qrl import formats
from lit_qrl.errors import ConfigError, listed
from lit_qrl.formats.base import NumberFormat
from lit_qrl.formats.numerics import NONFINITE_REMEDY
from lit_qrl.formats.support import names_where, row_of
from lit_qrl.network.experts import ExpertStack, expert_stacks, hold_apart, stored_names
from lit_qrl.network.folder import FolderReader, FolderWriter, appearing, copy_side_files, read_config
from lit_qrl.network.linears import (
    check_quantizable,
    fused_group,
    fused_groups,
    quantizable_layers,
    quantizable_linears,
)
from lit_qrl.network.names import kept_in_fp32
from lit_qrl.network.stream import quantize_named, shared_amax
from lit_qrl.network.structure import decoder_layers, outline
from lit_qrl.precision.base import check_shapes
from lit_qrl.rollout.vllm.checks import plain_mixtures

log = logging.getLogger(__name__)

SHARD_BYTES = 4 * 2**30
"""Largest shard that is written; it waits in memory."""


@dataclass(frozen=True)
class QuantizeReport:
    """What was made.

    Args:
        layers: names of the quantized layers.
        bytes_before: of the checkpoint.
        bytes_after: of what was written.
    """

    layers: tuple[str, ...]
    bytes_before: int
    bytes_after: int


def writable(format: NumberFormat | str, **options: Any) -> NumberFormat:
    """Return the format of that name: a weight-only one, or one of 8 bits that an adapter can be trained over.

    Raises:
        ConfigError: for an unknown format, or one of which no frozen base is held.
    """
    found = formats.get(format, **options)
    if not found.packs:
        raise ConfigError(
            f"{found.name} is no weight-only format, nor one of 8 bits.",
            expected=" or ".join(_packing(names_where(lambda row: row.folders))),
            given=found,
            remedy="Other formats are made at each publish: set publisher.format.",
        )
    return found


def _packing(names: Collection[str]) -> list[str]:
    return [name for name in names if formats.get(name).packs]


def quantize_checkpoint(
    source: Path,
    output: Path,
    format: NumberFormat,
    exclude: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> QuantizeReport:
    """Write the checkpoint of `source` in `format` to `output`, and return what was done.

    One decoder layer and the shard being written are in memory.

    Args:
        source: a Hugging Face folder with safetensors.
        output: the folder to make; it appears when it is whole.
        format: a weight-only format.
        exclude: globs over names of linear layers that stay as they are, beside output head and routers.
        dtype: what weights are cast to first; None leaves them as they are stored, but for what stays plain beside a
            format whose row has a `folder_dtype`.
        device: where layers are quantized.
        shard_bytes: largest shard.
        progress: told after each decoder layer (done, total).

    Raises:
        ConfigError: for whatever keeps the folder from being made.
    """
    if not row_of(format).folders:
        raise ConfigError(
            f"No library reads a folder in {format.name}, a format for studies of the mismatch.",
            expected=", ".join(names_where(lambda row: row.folders)),
            given=format.name,
            remedy="Choose one of these; `lit-qrl export --format bf16` writes the master weights of a run.",
        )
    config = read_config(source)
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ConfigError(
            f"{source} is quantized already.",
            expected="a checkpoint in bf16, fp16 or fp32",
            given=f"quant_method {method}",
            remedy="Start from the plain checkpoint: rounding twice adds the errors.",
        )
    only = row_of(format).folder_dtype
    if only is not None and dtype not in (None, only):
        raise ConfigError(
            f"transformers multiplies {format.name} out in bf16, whatever the rest of the folder has, and then fails.",
            expected="--dtype bf16 or auto",
            given=dtype,
        )
    checkpoint = FolderReader(source)
    network = _skeleton(source)
    layers = _chosen(network, format, exclude)
    mixture = plain_mixtures(network, exclude)
    checkpoint.rename(stored_names(network, checkpoint.names))
    hold_apart(network, {name: stack for name, stack in expert_stacks(network).items() if stack.apart})
    _check_names(network, checkpoint)
    parameters = sum(rows * columns for rows, columns in layers.values())
    dtypes = (checkpoint.dtype(f"{name}.weight") for name in layers)
    stored = next((one.itemsize for one in dtypes if one is not None), 2)
    expected_bytes = checkpoint.bytes - int(parameters * (stored - format.bits_per_weight / 8))
    plain = [name for name, part in network.named_modules() if isinstance(part, nn.Linear) and name not in layers]
    # transformers asks for a layer by its name in the model, vLLM by that in the checkpoint
    plain = list(dict.fromkeys(other for name in plain for other in (name, _stored_layer(checkpoint, name))))
    plain += [name for name in mixture if name not in plain]
    worker = _Worker(network, checkpoint, format, layers, dtype, torch.device(device))
    with appearing(output, expected_bytes) as folder:
        writer = FolderWriter(folder, shard_bytes)
        try:
            for name, tensor in worker.tensors(progress):
                writer.add(name, tensor)
        except ConfigError as error:  # NaN in a weight, named
            if error.remedy != NONFINITE_REMEDY:
                raise
            what = f"{source} cannot be quantized: {error.what}"
            raise ConfigError(
                what, expected="finite values", remedy="Download or copy the checkpoint again."
            ) from error
        writer.close()
        copy_side_files(source, folder)
        config["quantization_config"] = format.quantization_config(plain)
        if (written := dtype or only) is not None:
            config.pop("torch_dtype", None)
            config["dtype"] = str(written).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return QuantizeReport(tuple(layers), checkpoint.bytes, writer.bytes)


def _skeleton(source: Path) -> Any:
    try:
        return outline(AutoConfig.from_pretrained(source), dtype=torch.float32)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"{source} is no causal language model that transformers knows.", given=str(error).splitlines()[0]
        ) from error


def _chosen(network: Any, format: NumberFormat, exclude: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return (out, in) of the layers to quantize, experts one by one, by their names in the model."""
    check_quantizable(network, format.name, exclude, "--exclude")
    _check_experts(expert_stacks(network, exclude), format)
    linears = quantizable_linears(network, exclude)
    layers = quantizable_layers(network, exclude)
    if not layers:
        raise ConfigError(
            "No linear layer is left to quantize.",
            expected="at least one nn.Linear beside the output embedding and the routers",
            given=f"--exclude {' '.join(exclude)}" if exclude else type(network).__name__,
        )
    own = {name: type(layer) for name, layer in linears.items() if type(layer).forward is not nn.Linear.forward}
    if own:
        raise ConfigError(
            f"{next(iter(own.values())).__name__} multiplies by its weight itself, so that transformers could not load "
            "packed ones.",
            expected="a model made of nn.Linear",
            given=listed(own, 2),
            remedy="Quantize at each publish instead: set publisher.format.",
        )
    check_shapes(format, layers, "--exclude", exclude)
    fused = {fused_group(name) for name in layers}
    split = [name for name in quantizable_layers(network) if name not in layers and fused_group(name) in fused]
    if split:
        raise ConfigError(
            "--exclude splits layers that engines multiply as one.",
            expected=f"all parts of {fused_group(split[0])}, or none",
            given=f"{split[0]} alone",
            remedy="Exclude q, k and v together, and gate and up together.",
        )
    return layers


def _check_experts(stacks: Mapping[str, ExpertStack], format: NumberFormat) -> None:
    """Raise `ConfigError` for experts that no library would read in the format."""
    whole = [name for name, stack in stacks.items() if not stack.apart]
    if whole:
        raise ConfigError(
            f"Checkpoints of this model hold the experts of a layer in one piece, which no library reads in "
            f"{format.name}.",
            expected="a family whose checkpoints hold experts one by one, such as Qwen3-MoE, Mixtral or DeepSeek-V3",
            given=listed(whole, 2),
            remedy="Leave them plain with --exclude '*.experts', or quantize them at each publish: set "
            "publisher.format.",
        )
    known = _packing(names_where(lambda row: bool(row.folder_experts)))
    readers = row_of(format).folder_experts
    if stacks and not readers:
        raise ConfigError(
            f"No library reads experts in {format.name} from a folder.",
            expected=f"{', '.join(known)}, or --exclude '*.experts'",
            given=listed(stacks, 2),
            remedy="Choose one of these, or quantize them at each publish: set publisher.format.",
        )
    if stacks and "transformers" not in readers:
        log.warning(
            "transformers does not read experts in %s: it would take other numbers for them and say no more than "
            "'UNEXPECTED'. %s reads them%s.",
            format.name,
            " and ".join(readers),
            ", and so does PackedLoRA" if format.packs else "",
        )


def _stored_layer(checkpoint: FolderReader, name: str) -> str:
    """Return the name in the files of a layer with a weight."""
    return checkpoint.stored(f"{name}.weight").removesuffix(".weight")


def _check_names(network: Any, checkpoint: FolderReader) -> None:
    """Raise where the folder's tensors are not those of the architecture that its config names."""
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    one: dict[int, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        one.setdefault(id(parameter), []).append(name)
    held = {name for names in one.values() if any(n in checkpoint.shapes for n in names) for name in names}
    missing = [name for name in expected if name not in checkpoint.shapes and name not in held]
    # old checkpoints hold the rotary frequencies, which are computed today
    unknown = [n for n in checkpoint.names if n not in expected and not n.endswith("rotary_emb.inv_freq")]
    other = [n for n in expected if n in checkpoint.shapes and checkpoint.shapes[n] != expected[n]]
    for names, text in ((missing, "lacks"), (unknown, "holds, unknown to it,"), (other, "holds in another shape")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ConfigError(
                f"{checkpoint.folder} is not a checkpoint of {type(network).__name__}, which its config names: "
                f"it {text} {names[0]}{more}.",
                expected="the tensors of that architecture",
                remedy="Take config and weights of one model.",
            )
    packed = [name for name in expected if name in checkpoint.shapes and checkpoint.dtype(name) is None]
    if packed:
        raise ConfigError(
            f"{packed[0]} is stored as {checkpoint.dtypes[packed[0]]}.",
            expected="BF16, F16 or F32",
            remedy="Start from the plain checkpoint.",
        )


@dataclass
class _Worker:
    """Yields the tensors of the quantized checkpoint."""

    network: Any
    checkpoint: FolderReader
    format: NumberFormat
    layers: Collection[str]
    dtype: torch.dtype | None
    device: torch.device

    def __post_init__(self) -> None:
        self.plain, self.kept = row_of(self.format).folder_dtype, kept_in_fp32(self.network)

    def tensors(self, progress: Callable[[int, int], None]) -> Iterator[tuple[str, Tensor]]:
        prefix, decoder = decoder_layers(self.network)
        total = len(decoder)
        known = [name for name in self.network.state_dict() if name in self.checkpoint.shapes]
        inner = [[name for name in known if name.startswith(f"{prefix}.{i}.")] for i in range(total)]
        outer = [name for name in known if not name.startswith(f"{prefix}.")]
        progress(0, total)
        for index, names in enumerate(inner):
            yield from self._quantized(self._read(names))
            progress(index + 1, total)
        for name in outer:  # embedding and head are the largest tensors of all
            yield from self._quantized(self._read([name]))

    def _read(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {
            name: tensor.to(device=self.device, dtype=self.dtype if tensor.is_floating_point() else None)
            for name, tensor in self.checkpoint.read(names).items()
        }

    @torch.no_grad()
    def _quantized(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        inside = [name for name in self.layers if f"{name}.weight" in tensors]
        for names in fused_groups(inside).values():
            parts = {name: tensors.pop(f"{name}.weight") for name in names}
            shared = shared_amax(parts) if self.format.shares_amax and len(parts) > 1 else None
            for name in names:
                quantized = quantize_named(self.format, name, parts.pop(name), shared)
                yield from self.format.checkpoint(quantized, _stored_layer(self.checkpoint, name))
        for name, tensor in tensors.items():
            # smallest and largest, which a NaN becomes too: `isfinite` would need memory for every element
            if tensor.is_floating_point() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
                raise ConfigError(f"{name} holds NaN or inf.", remedy=NONFINITE_REMEDY)
            casts = self.plain is not None and name not in self.kept and tensor.is_floating_point()
            yield self.checkpoint.stored(name), tensor.to(self.plain) if casts else tensor
