"""`lit-qrl quantize`: a plain checkpoint becomes one in a weight-only format."""

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lit_qrl.cli.parser import CommandParser
from lit_qrl.errors import ConfigError

_EXAMPLES = """
examples:
  lit-qrl quantize --model Qwen/Qwen2.5-7B-Instruct --format nvfp4 --output quantized/7b-nvfp4
  lit-qrl quantize --model models/mine --format int4_group --group_size 64 --exclude '*.down_proj' --output out
  lit-qrl quantize --model Qwen/Qwen2.5-32B-Instruct --format nvfp4 --output quantized/32b-nvfp4 \\
      --awq true --calibration open-thoughts/OpenThoughts-114k --calibration_column conversations

The output is a Hugging Face folder: vLLM and transformers load it, and `lit-qrl fit` trains an adapter over it
(model.policy.model OUTPUT, with NVFP4LoRA in the same format). It appears when it is whole.
"""
# Part of a text in a data set of conversations.
_MESSAGE_KEYS = ("content", "value")


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = CommandParser(
        "quantize",
        description="Write a model in a weight-only number format, layer by layer: memory holds one decoder layer and "
        "the shard being written.",
        epilog=_EXAMPLES,
    )
    made.add_argument("--model", required=True, metavar="MODEL", help="folder with safetensors, or name on the hub")
    made.add_argument("--format", required=True, help="nvfp4, mxfp4, int4_group or nf4")
    made.add_argument("--output", required=True, type=Path, help="folder to make; new or empty")
    made.add_argument("--group_size", type=int, metavar="N", help="inputs per scale of int4_group (default: 128)")
    made.add_argument(
        "--exclude",
        nargs="*",
        default=[],
        metavar="GLOB",
        help="names of linear layers that stay as they are, beside output head and routers",
    )
    made.add_argument(
        "--dtype",
        metavar="auto|bf16|fp16|fp32",
        choices=["auto", "bf16", "fp16", "fp32"],
        default="auto",
        help="of everything else; auto keeps what is stored (default: auto)",
    )
    made.add_argument("--device", default="auto", help="where layers are quantized (default: a GPU if there is one)")
    made.add_argument("--shard_gib", type=float, metavar="GIB", default=4.0, help="largest file written (default: 4)")
    made.add_argument("--revision", help="branch, tag or commit on the hub")
    awq = made.add_argument_group("AWQ scaling of input channels")
    awq.add_argument("--awq", type=_truth, default=False, metavar="true|false", help="default: false")
    awq.add_argument("--calibration", metavar="DATA", help="JSONL, JSON, CSV or Parquet file, folder, or hub data set")
    awq.add_argument("--calibration_column", default="text", metavar="NAME", help="column of the text (default: text)")
    awq.add_argument("--calibration_split", default="train", metavar="NAME", help="of a data set (default: train)")
    awq.add_argument("--calibration_samples", type=int, metavar="N", default=256, help="sequences (default: 256)")
    awq.add_argument("--calibration_tokens", type=int, metavar="N", default=2048, help="tokens of each (default: 2048)")
    awq.add_argument("--seed", type=int, metavar="N", default=0, help="of the texts' order (default: 0)")
    return made


def _truth(text: str) -> bool:
    values = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return values[text.lower()]


def main(argv: Sequence[str] | None = None) -> None:
    """Quantize and print what was made.

    Raises:
        ConfigError: for whatever keeps the folder from being made.
    """
    arguments = parser().parse_args(argv)
    if arguments.awq and not arguments.calibration:
        raise ConfigError(
            "AWQ scaling needs calibration text.",
            expected="--calibration with a file or data set",
            remedy="QeRL took 256 sequences of 2048 tokens of open-thoughts/OpenThoughts-114k.",
        )
    if arguments.calibration and not arguments.awq:
        raise ConfigError("--calibration is for AWQ scaling, which is off.", remedy="Add --awq true, or leave it out.")
    for name in ("shard_gib", "calibration_samples", "calibration_tokens"):
        if getattr(arguments, name) <= 0:
            raise ConfigError(f"--{name} is too small.", expected="a positive number", given=getattr(arguments, name))

    import torch

    from lit_qrl.network.folder import local_folder, refuse_existing
    from lit_qrl.policy import DTYPES
    from lit_qrl.quantize.folder import quantize_checkpoint, weight_only

    options = {} if arguments.group_size is None else {"group_size": arguments.group_size}
    format = weight_only(arguments.format, **options)
    refuse_existing(arguments.output)
    source = local_folder(arguments.model, arguments.revision)
    device = _device(arguments.device)
    sequences = _sequences(arguments, source) if arguments.awq else None
    with _bar("layers") as progress:
        report = quantize_checkpoint(
            source,
            arguments.output,
            format,
            exclude=arguments.exclude,
            dtype=DTYPES.get(arguments.dtype),
            sequences=sequences,
            device=device,
            shard_bytes=int(arguments.shard_gib * 2**30),
            progress=progress,
        )
    print(
        f"{arguments.output}: {len(report.layers)} linear layers in {format.name}, "
        f"{_size(report.bytes_before)} -> {_size(report.bytes_after)}"
    )
    if report.found:
        print(f"AWQ: the layers' output error is {report.loss_ratio:.2f} of plain rounding's, mean over groups")
    if device.type == "cuda":
        print(f"peak GPU memory: {_size(torch.cuda.max_memory_allocated(device))}")


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


def _sequences(arguments: argparse.Namespace, source: Path) -> Any:
    """Return token ids "samples tokens" of calibration text."""
    from transformers import AutoTokenizer

    from lit_qrl.data.sources import check_columns, read_rows
    from lit_qrl.network.folder import read_config
    from lit_qrl.quantize.calibration import calibration_sequences

    longest = read_config(source).get("max_position_embeddings")
    if longest and arguments.calibration_tokens > longest:
        raise ConfigError(
            "--calibration_tokens is more than the model has positions.",
            expected=f"at most {longest}",
            given=arguments.calibration_tokens,
        )
    rows = read_rows(arguments.calibration, arguments.calibration_split)
    check_columns(rows, [arguments.calibration_column], arguments.calibration)
    random.Random(arguments.seed).shuffle(rows)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"The tokenizer of {source} cannot be loaded: {str(error).splitlines()[0]}") from error
    texts = (_text(row[arguments.calibration_column]) for row in rows)
    count, length = arguments.calibration_samples, arguments.calibration_tokens
    return calibration_sequences(
        lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        texts,
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
