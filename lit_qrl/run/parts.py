"""Checkpoints of tensors that processes share: each writes its parts (DCP), any number of processes reads them."""

import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_qrl.errors import ConfigError

FOLDER = "parts"
"""Under this key a checkpoint names the folder, beside its file, that holds its divided tensors."""


def take_parts(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    """Take the divided tensors out of weights and optimizer states, and return them by one name each.

    Args:
        checkpoint: as the Trainer makes it; the rest stays.
    """
    found: dict[str, Tensor] = {}
    weights = checkpoint["state_dict"]
    found |= {weight_key(name): weights.pop(name) for name in list(weights) if isinstance(weights[name], DTensor)}
    for number, optimizer in enumerate(checkpoint.get("optimizer_states", ())):
        for index, kept in optimizer["state"].items():
            for name in [name for name, value in kept.items() if isinstance(value, DTensor)]:
                found[state_key(number, index, name)] = kept.pop(name)
    return found


def weight_key(name: str) -> str:
    """Return under which name a weight is written.

    >>> weight_key("policy.model.norm.weight")
    'weights.policy.model.norm.weight'
    """
    return f"weights.{name}"


def state_key(number: int, index: int, name: str) -> str:
    """Return under which name what an optimizer keeps of a parameter is written.

    Args:
        number: of the optimizer.
        index: of the parameter.
        name: of what is kept.

    >>> state_key(0, 12, "exp_avg")
    'optimizers.0.12.exp_avg'
    """
    return f"optimizers.{number}.{index}.{name}"


def written_states(keys: Iterable[str], number: int) -> Iterator[tuple[int, str]]:
    """Yield index of the parameter and name of what optimizer `number` keeps of it.

    >>> list(written_states(["weights.a", "optimizers.0.12.exp_avg", "optimizers.1.0.exp_avg"], 0))
    [(12, 'exp_avg')]
    """
    for key in keys:
        if key.startswith(f"optimizers.{number}."):
            index, _, name = key.split(".", 2)[2].partition(".")
            yield int(index), name


def new_folder(beside: Path, step: int) -> Path:
    """Return a folder for the parts of a checkpoint that no other one has; it is not made.

    Args:
        beside: the checkpoint's file.
        step: of the optimizer.
    """
    names = (f"parts-{step}{f'-{again}' if again else ''}" for again in range(10**6))
    return next(folder for name in names if not (folder := beside.parent / name).exists())


def write_parts(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write tensors, each process its own parts; returns when all are on the disk."""
    dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder))


def read_parts(tensors: dict[str, Tensor], folder: Path) -> None:
    """Fill tensors, each process its own parts, whatever the number of processes that wrote them."""
    if tensors:
        _load(dict(tensors), folder)


def _load(tensors: dict[str, Any], folder: Path, **options: Any) -> None:
    with warnings.catch_warnings():  # a process that reads alone is told that it does
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), **options)


def parts_of(checkpoint: Mapping[str, Any], path: str | Path) -> Path | None:
    """Return the folder of a checkpoint's divided tensors, or None of one whose tensors are in its file.

    Args:
        checkpoint: as `torch.load` returns it.
        path: its file.

    Raises:
        ConfigError: for a folder that is not there.
    """
    if FOLDER not in checkpoint:
        return None
    folder = Path(path).parent / checkpoint[FOLDER]
    if not (folder / ".metadata").is_file():
        raise ConfigError(
            f"The checkpoint {path} was written in parts, and they are not beside it.",
            expected=f"the folder {folder} with its .metadata",
            remedy="Move or copy a checkpoint together with its folder.",
        )
    return folder


def shapes_of(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of every tensor that was written in parts, by its name there."""
    found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {key: (one.size, one.properties.dtype) for key, one in found.items() if hasattr(one, "size")}  # pyright: ignore


def put_together(checkpoint: dict[str, Any], path: str | Path, optimizers: bool = True) -> None:
    """Put whole tensors, on the host, where a checkpoint had them divided; one without parts stays as it is.

    Args:
        checkpoint: as `torch.load` returns it.
        path: its file.
        optimizers: their states too, not the weights alone.
    """
    folder = parts_of(checkpoint, path)
    if folder is None:
        return
    shapes = shapes_of(folder)
    wanted = [key for key in shapes if optimizers or key.startswith(weight_key(""))]
    whole: dict[str, Any] = {key: torch.empty(shapes[key][0], dtype=shapes[key][1]) for key in wanted}
    _load(whole, folder, no_dist=True)
    prefix = weight_key("")
    names = {key.removeprefix(prefix): whole[key] for key in whole if key.startswith(prefix)}
    checkpoint["state_dict"] = {**checkpoint["state_dict"], **names}
    for number, optimizer in enumerate(checkpoint.get("optimizer_states", ()) if optimizers else ()):
        for index, name in written_states(whole, number):
            optimizer["state"][index][name] = whole[state_key(number, index, name)]
    del checkpoint[FOLDER]


def remove_unused(folder: Path, kept: Path) -> None:
    """Remove the parts that no checkpoint of a folder names.

    Args:
        folder: of the checkpoints.
        kept: parts of the checkpoint that is being written.
    """
    named = {kept.name}
    for file in folder.glob("*.ckpt"):
        try:
            named.add(torch.load(file, map_location="meta", weights_only=True, mmap=True).get(FOLDER, ""))
        except Exception:  # of a damaged file it is not known what it names
            return
    for parts in folder.glob("parts-*"):
        if parts.name not in named:
            shutil.rmtree(parts, ignore_errors=True)
