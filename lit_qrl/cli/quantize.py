"""`lit-qrl quantize`: a plain checkpoint becomes one in a format of 4 or 8 bits."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lit_qrl.errors import ConfigError

if TYPE_CHECKING:
    from lit_qrl.quantize import QuantizeReport


def quantize(
    *,
    model: str,
    format: str,
    output: Path,
    group_size: int | None = None,
    exclude: Sequence[str] = (),
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto",
    device: str = "auto",
    shard_gib: float = 4.0,
    revision: str | None = None,
) -> "QuantizeReport":
    """Write a model in a number format of 4 or 8 bits, layer by layer: memory holds one decoder layer and the shard
    being written.

    Examples:
      lit-qrl quantize --model Qwen/Qwen2.5-7B-Instruct --format nvfp4 --output quantized/7b-nvfp4
      lit-qrl quantize --model models/mine --format int4_group --group_size 64 --exclude '*.down_proj' --output out

    The output is a Hugging Face folder: vLLM and transformers load it, and `lit-qrl fit` trains an adapter over it
    (model.policy.model OUTPUT, with PackedLoRA in the same format). The folder appears only when complete. Weights are
    rounded as they are; for calibrated scales (AWQ) see docs/precision.md.

    Args:
        model: folder with safetensors, or name on the hub.
        format: nvfp4, mxfp4, mxfp8, int4_group, nf4, fp8_row, fp8_block, fp8_tensor or int8_channel.
        output: folder to make; new or empty.
        group_size: inputs per scale of int4_group (default: 128).
        exclude: linear layers that stay as they are, beside output head and routers: names, in which * stands for any
            part.
        dtype: of everything else; auto keeps what is stored.
        device: where layers are quantized; auto takes a GPU if there is one.
        shard_gib: largest file written, in GiB.
        revision: branch, tag or commit on the hub.

    Returns:
        what was made; sizes are printed.

    Raises:
        ConfigError: for whatever keeps the folder from being made.
    """
    if shard_gib <= 0:
        raise ConfigError("--shard_gib is too small.", expected="a positive number", given=shard_gib)
    import torch

    from lit_qrl.network.folder import local_folder, refuse_existing
    from lit_qrl.policy import DTYPES
    from lit_qrl.quantize import quantize_checkpoint, writable

    options = {} if group_size is None else {"group_size": group_size}
    chosen = writable(format, **options)
    refuse_existing(output)
    source = local_folder(model, revision)
    place = _device(device)
    with _bar("layers") as progress:
        report = quantize_checkpoint(
            source,
            output,
            chosen,
            exclude=exclude,
            dtype=DTYPES.get(dtype),
            device=place,
            shard_bytes=int(shard_gib * 2**30),
            progress=progress,
        )
    print(
        f"{output}: {len(report.layers)} linear layers in {chosen.name}, "
        f"{_size(report.bytes_before)} -> {_size(report.bytes_after)}"
    )
    if place.type == "cuda":
        print(f"peak GPU memory: {_size(torch.cuda.max_memory_allocated(place))}")
    return report


def _size(count: float) -> str:
    """Return bytes in GiB, below a tenth of one in MiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 0.1 * 2**30 else f"{count / 2**20:.2f} MiB"


def _device(name: str) -> Any:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"--device {name} cannot be used.", expected="cpu, or cuda on a machine that has it", given=str(error)[:200]
        ) from error
    return device


@contextmanager
def _bar(unit: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function (done, total) that draws a progress bar on stderr."""
    from rich import progress as rich
    from rich.console import Console

    columns = (rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeElapsedColumn(), rich.TimeRemainingColumn())
    with rich.Progress(unit, *columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(unit, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
