"""`lit-qrl quantize`: a plain checkpoint becomes one in a format of 4 or 8 bits."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lit_qrl.errors import ConfigError

if TYPE_CHECKING:
    from lit_qrl.quantize.folder import QuantizeReport

# Part of a text in a data set of conversations.
_MESSAGE_KEYS = ("content", "value")


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
    awq: bool = False,
    calibration: str | None = None,
    calibration_column: str = "text",
    calibration_split: str = "train",
    calibration_samples: int = 256,
    calibration_tokens: int = 2048,
    seed: int = 0,
) -> "QuantizeReport":
    r"""Write a model in a number format of 4 or 8 bits, layer by layer: memory holds one decoder layer and the shard
    being written.

    Examples:
      lit-qrl quantize --model Qwen/Qwen2.5-7B-Instruct --format nvfp4 --output quantized/7b-nvfp4
      lit-qrl quantize --model models/mine --format int4_group --group_size 64 --exclude '*.down_proj' --output out
      lit-qrl quantize --model Qwen/Qwen2.5-32B-Instruct --format nvfp4 --output quantized/32b-nvfp4 \
          --awq true --calibration open-thoughts/OpenThoughts-114k --calibration_column conversations

    The output is a Hugging Face folder: vLLM and transformers load it, and `lit-qrl fit` trains an adapter over it
    (model.policy.model OUTPUT, with PackedLoRA in the same format). It appears when it is whole.

    Args:
        model: folder with safetensors, or name on the hub.
        format: nvfp4, mxfp4, int4_group, nf4, fp8_row, fp8_block, fp8_tensor or int8_channel.
        output: folder to make; new or empty.
        group_size: inputs per scale of int4_group (default: 128).
        exclude: linear layers that stay as they are, beside output head and routers: names, in which * stands for any
            part.
        dtype: of everything else; auto keeps what is stored.
        device: where layers are quantized; auto takes a GPU if there is one.
        shard_gib: largest file written, in GiB.
        revision: branch, tag or commit on the hub.
        awq: scale input channels by AWQ, which takes calibration text.
        calibration: text for AWQ: JSONL, JSON, CSV or Parquet file, folder, or hub data set.
        calibration_column: of the text.
        calibration_split: of a data set.
        calibration_samples: sequences.
        calibration_tokens: of each sequence.
        seed: of the texts' order.

    Returns:
        what was made; sizes, and with AWQ the gain, are printed.

    Raises:
        ConfigError: for whatever keeps the folder from being made.
    """
    if awq and not calibration:
        raise ConfigError(
            "AWQ scaling needs calibration text.",
            expected="--calibration with a file or data set",
            remedy="QeRL took 256 sequences of 2048 tokens of open-thoughts/OpenThoughts-114k.",
        )
    if calibration and not awq:
        raise ConfigError("--calibration is for AWQ scaling, which is off.", remedy="Add --awq true, or leave it out.")
    positive = {
        "shard_gib": shard_gib,
        "calibration_samples": calibration_samples,
        "calibration_tokens": calibration_tokens,
    }
    for name, value in positive.items():
        if value <= 0:
            raise ConfigError(f"--{name} is too small.", expected="a positive number", given=value)

    import torch

    from lit_qrl.network.folder import local_folder, refuse_existing
    from lit_qrl.policy import DTYPES
    from lit_qrl.quantize.folder import quantize_checkpoint, writable

    options = {} if group_size is None else {"group_size": group_size}
    chosen = writable(format, **options)
    if awq and chosen.quantizes_activations:
        raise ConfigError(
            f"AWQ weighs the rounding of weights alone, and {chosen.name} rounds activations too.",
            expected="nvfp4, mxfp4, int4_group or nf4",
            given=f"--format {chosen.name} --awq true",
            remedy="Leave --awq out.",
        )
    refuse_existing(output)
    source = local_folder(model, revision)
    place, sequences = _device(device), None
    if calibration:
        rows = _rows(calibration, calibration_split, calibration_column, seed)
        sequences = _sequences(source, rows, calibration_samples, calibration_tokens)
    with _bar("layers") as progress:
        report = quantize_checkpoint(
            source,
            output,
            chosen,
            exclude=exclude,
            dtype=DTYPES.get(dtype),
            sequences=sequences,
            device=place,
            shard_bytes=int(shard_gib * 2**30),
            progress=progress,
        )
    print(
        f"{output}: {len(report.layers)} linear layers in {chosen.name}, "
        f"{_size(report.bytes_before)} -> {_size(report.bytes_after)}"
    )
    if report.found:
        print(f"AWQ: the layers' output error is {report.loss_ratio:.2f} of plain rounding's, mean over groups")
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


def _rows(calibration: str, split: str, column: str, seed: int) -> list[Any]:
    """Return the cells of the calibration column, in the order of the seed."""
    from lit_qrl.data.sources import check_columns, read_rows

    rows = read_rows(calibration, split)
    check_columns(rows, [column], calibration)
    random.Random(seed).shuffle(rows)
    return [row[column] for row in rows]


def _sequences(source: Path, cells: Sequence[Any], count: int, length: int) -> Any:
    """Return token ids "count length" of calibration text."""
    from transformers import AutoTokenizer

    from lit_qrl.network.folder import read_config
    from lit_qrl.quantize.calibration import calibration_sequences

    longest = read_config(source).get("max_position_embeddings")
    if longest and length > longest:
        raise ConfigError(
            "--calibration_tokens is more than the model has positions.", expected=f"at most {longest}", given=length
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"The tokenizer of {source} cannot be loaded: {str(error).splitlines()[0]}") from error
    return calibration_sequences(
        lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        map(_text, cells),
        count,
        length,
        tokenizer.eos_token_id,
    )


def _text(cell: Any) -> str:
    """Return the text of a cell: a string, or the messages of a conversation one under another."""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, list):
        parts = [next((str(m[k]) for k in _MESSAGE_KEYS if k in m), "") if isinstance(m, dict) else m for m in cell]
        return "\n".join(map(str, parts))
    raise ConfigError(
        "The calibration column holds no text.",
        expected="strings, or lists of messages",
        given=repr(cell)[:80],
        remedy="Name another with --calibration_column.",
    )


@contextmanager
def _bar(unit: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function (done, total) that draws a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(unit), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task(unit, total=None)

    def progress(done: int, total: int) -> None:
        bar.start()  # not before there is work, so that an error stands alone
        bar.update(task, completed=done, total=total)

    try:
        yield progress
    finally:
        bar.stop()
