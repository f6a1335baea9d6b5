"""Checkpoint files: whole or not at all, written in the background; whose they are; and in parts."""

import errno
import os
import pickle
import re
import shutil
import threading
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.serialization import config

from lit_qrl.errors import ConfigError, StoppedError, listed, not_written, out_of_memory
from lit_qrl.run.folder import shown
from lit_qrl.run.host_memory import HostMemory

_staging: ContextVar[bool] = ContextVar("staging", default=False)


class Later:
    """What a staged checkpoint will hold in a place, known when it is written.

    Args:
        made: returns it, in the thread that writes.
    """

    def __init__(self, made: Callable[[], Any]) -> None:
        self.made = made


def when_written(made: Callable[[], Any]) -> Any:
    """Return what a checkpoint holds in a place: at once, or a `Later` where it is written in the background.

    >>> when_written(lambda: 2)
    2
    """
    return Later(made) if _staging.get() else made()


@contextmanager
def staging() -> Iterator[None]:
    """Say that the checkpoint which is made meanwhile goes to `CheckpointFiles.save`."""
    token = _staging.set(True)
    try:
        yield
    finally:
        _staging.reset(token)


class CheckpointFiles:
    """Writes one checkpoint at a time, in a thread of its own.

    `save` copies every tensor into memory of the host, which the next save uses again, and returns; the thread writes
    the file beside its place, forces it to the disk, and moves it there, so that whoever reads finds the previous
    checkpoint or the new one. Further targets are names of the same file where the disk can give one more than one. An
    error of the thread is raised by the next `save` or `wait`.
    """

    def __init__(self) -> None:
        self._memories = {pinned: HostMemory(pinned) for pinned in (True, False)}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._target = Path()

    def save(self, checkpoint: dict[str, Any], targets: Sequence[Path]) -> None:
        """Stage a checkpoint and begin to write it to every target, after the one before it is written.

        Args:
            checkpoint: anything that `torch.save` takes; its tensors may change as soon as this returns. The thread
                puts in what is to come later.
            targets: the files.

        Raises:
            StoppedError: when the checkpoint before could not be written.
        """
        self.wait()
        staged = self._stage(checkpoint)
        self._thread = threading.Thread(target=self._write, args=(staged, list(targets)), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when everything is written.

        Raises:
            StoppedError: when it could not be.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise StoppedError(_sentence(self._target, error)) from error

    @property
    def writing(self) -> bool:
        """True while a file is being written."""
        return self._thread is not None and self._thread.is_alive()

    def _stage(self, checkpoint: dict[str, Any]) -> Any:
        """Return the checkpoint with every tensor on the host."""
        leaves, structure = pytree.tree_flatten(checkpoint)
        for memory in self._memories.values():
            memory.reset()
        copies: dict[tuple[Any, ...], Tensor] = {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                key = leaf.data_ptr(), leaf.dtype, leaf.size(), leaf.stride()
                if key not in copies or not leaf.numel():  # tied weights are one tensor in the file too
                    on_gpu = leaf.device.type == "cuda"
                    copies[key] = self._memories[on_gpu].like(leaf).copy_(leaf.detach(), non_blocking=on_gpu)
                leaves[index] = copies[key]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return pytree.tree_unflatten(leaves, structure)

    def _write(self, staged: Any, targets: list[Path]) -> None:
        for target in targets:
            self._target = target
            partial = target.with_name(f".{target.name}.partial")
            try:
                if target == targets[0] or not _same_file(targets[0], partial):
                    staged = pytree.tree_map(lambda leaf: leaf.made() if isinstance(leaf, Later) else leaf, staged)
                    # without the sums that nobody looks at: the run would stand still while they are made
                    without_sums: Any = config  # whose methods are put on it when it is imported
                    with partial.open("wb") as file, without_sums.patch("save.compute_crc32", False):
                        torch.save(staged, file)
                        file.flush()
                        os.fsync(file.fileno())
                os.replace(partial, target)
                _sync_folder(target.parent)
            except BaseException as error:
                self._error = error
                with suppress(OSError):
                    partial.unlink(missing_ok=True)
                return


def _same_file(written: Path, name: Path) -> bool:
    """Give a file that is never written again, only replaced, another name; return whether the disk can."""
    name.unlink(missing_ok=True)
    try:
        os.link(written, name)
    except OSError:  # file systems without hard links, or with as many as they allow
        return False
    return True


def _sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk, where the system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _sentence(target: Path, error: BaseException) -> str:
    # torch's own writer turns an error of the file into one of its own
    error = error.__context__ if isinstance(error.__context__, OSError) else error
    if not isinstance(error, OSError):
        full = "failed writing" in str(error)
        error = OSError(errno.ENOSPC if full else errno.EIO, f"{type(error).__name__}: {error}")
    again = "The one before it is whole: go on with --ckpt_path last." if target.exists() else "It was the first one."
    return f"The run was stopped. {not_written(shown(target), error)} {again}"


SHAPE = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
"""What tells one model from another in its config."""
SAMPLED = 64
"""Numbers of each tensor that tell one base from another, spread over it."""


def identity(policy: Any) -> dict[str, Any]:
    """Return what a checkpoint says about the policy it is of: the model's shape and its adapter's.

    Args:
        policy: with the model's `config`, and `lora`, a PEFT config or None.
    """
    config = policy.config.get_text_config()
    shape = {name: getattr(config, name, None) for name in SHAPE}
    lora = policy.lora
    adapter = {"adapter": None if lora is None else str(lora.peft_type.value), "rank": getattr(lora, "r", None)}
    return {**shape, **adapter}


def check_identity(checkpoint: dict[str, Any], policy: Any) -> None:
    """Raise `ConfigError` when a checkpoint is of another model, or of no policy at all.

    Args:
        checkpoint: as `read_checkpoint` returns it; no tensor is read.
        policy: that is to be restored.
    """
    saved, own = checkpoint.get("policy"), identity(policy)
    if not isinstance(saved, dict):
        raise ConfigError(
            "The checkpoint holds no policy.", expected="one that a run of lit-qrl saved", remedy="Check --ckpt_path."
        )
    differing = [name for name in own if saved.get(name) != own[name]]
    if differing:
        raise ConfigError(
            "The checkpoint is of another model.",
            expected=", ".join(f"{name} {own[name]}" for name in differing),
            given=", ".join(f"{name} {saved.get(name)}" for name in differing),
            remedy="Set model.policy to what the checkpoint was trained from, or start without --ckpt_path.",
        )


def describe_frozen(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what a checkpoint says about the frozen weights that it leaves out: names, dtype and a fingerprint.

    The fingerprint is a short digest of names, shapes and some numbers of each tensor: equal for equal tensors.

    >>> one, other = (describe_frozen({"w": torch.full((3,), value)}) for value in (1.0, 2.0))
    >>> one["names"], one["dtype"], one["fingerprint"] == other["fingerprint"]
    (['w'], 'float32', False)
    """
    digest, samples = blake2b(digest_size=8), []
    for name, tensor in tensors.items():
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        # What processes share (a DTensor) is made whole, one at a time.
        flat = getattr(tensor.detach(), "full_tensor", tensor.detach)().flatten()
        if flat.is_floating_point():
            samples.append(flat[:: max(flat.numel() // SAMPLED, 1)][:SAMPLED].float())
    if samples:  # one transfer
        digest.update(torch.cat([sample.to(samples[0].device) for sample in samples]).cpu().numpy().tobytes())
    dtype = next((str(one.dtype).removeprefix("torch.") for one in tensors.values() if one.is_floating_point()), None)
    return {"names": list(tensors), "dtype": dtype, "fingerprint": digest.hexdigest()}


def check_frozen(checkpoint: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise `ConfigError` when the frozen weights that a checkpoint leaves out are not the ones loaded here.

    Args:
        checkpoint: as `read_checkpoint` returns it.
        tensors: the policy's weights, by the checkpoint's names; others than the frozen ones do not matter.
    """
    saved = checkpoint["policy"].get("frozen")
    if saved is None:
        return
    own = describe_frozen({name: tensors[name] for name in saved["names"] if name in tensors})
    if own["fingerprint"] != saved["fingerprint"]:
        raise ConfigError(
            "The checkpoint's adapter was trained over another base.",
            expected=f"frozen weights with fingerprint {saved['fingerprint']}",
            given=own["fingerprint"],
            remedy="Set model.policy to the model and the dtype that the run started from.",
        )


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
        dcp.load(tensors, storage_reader=_PartsReader(folder), **options)


METADATA = {
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # of Python 3.13
}
"""What the description of a checkpoint's parts is made of, by module; it may name nothing else."""


class _MetadataUnpickler(pickle.Unpickler):
    """Reads such a description, which torch would unpickle whatever it names."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name} was not an allowed global")
        return super().find_class(module, name)


class _PartsReader(dcp.FileSystemReader):
    """Reads the parts of a checkpoint; what describes them runs nothing."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            found: Metadata = _MetadataUnpickler(file).load()
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _DamageError(Exception):
    """What is wrong with a checkpoint, in a few words."""


def parts_of(checkpoint: Mapping[str, Any], path: str | Path) -> Path | None:
    """Return the folder of a checkpoint's divided tensors, or None of one whose tensors are in its file.

    Args:
        checkpoint: as `read_checkpoint` returns it.
        path: its file.

    Raises:
        ConfigError: for a folder that is not beside the file, or not whole.
    """
    with refusing_damaged(path):
        return _parts(checkpoint, Path(path).absolute().parent)


def _parts(checkpoint: Mapping[str, Any], beside: Path) -> Path | None:
    if FOLDER not in checkpoint:
        return None
    folder = _plain_child(beside, checkpoint[FOLDER])
    if not (folder / ".metadata").is_file():
        raise _DamageError(f"its parts are not beside it, in {folder}; a checkpoint is copied together with its folder")
    ends: dict[str, int] = defaultdict(int)
    stored: Iterable[_StorageInfo] = _PartsReader(folder).read_metadata().storage_data.values()
    for one in stored:
        ends[one.relative_path] = max(ends[one.relative_path], one.offset + one.length)
    for name, end in ends.items():
        file = _plain_child(folder, name)
        if not file.is_file() or file.stat().st_size < end:
            raise _DamageError(f"of its parts {file} is {'cut short' if file.is_file() else 'missing'}")
    return folder


def _plain_child(folder: Path, name: Any) -> Path:
    """Return what lies under one plain name in a folder itself; a checkpoint may name nothing else."""
    plain = isinstance(name, str) and name == Path(name).name != ".."
    if not plain or (folder / name).resolve().parent != folder.resolve():
        raise _DamageError(f"it names {name!r} as its part, which is not read: it does not lie in {folder}")
    return folder / name


def shapes_of(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of every tensor that was written in parts, by its name there."""
    found = _PartsReader(folder).read_metadata().state_dict_metadata
    return {key: (one.size, one.properties.dtype) for key, one in found.items() if hasattr(one, "size")}  # pyright: ignore


def read_checkpoint(path: str | Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Return what a checkpoint file holds, its tensors mapped from the file; nothing in it is run.

    Args:
        path: of the file.
        map_location: where its tensors come to lie; `meta` reads none.

    Raises:
        ConfigError: for a file that is damaged or no checkpoint, or whose parts are; it names those beside it that are
            whole.
    """
    with refusing_damaged(path):
        return _read(path, map_location)


def _read(path: str | Path, map_location: Any = "meta", whole: bool = True) -> dict[str, Any]:
    found = torch.load(path, map_location=map_location, weights_only=True, mmap=True)
    if not isinstance(found, dict):
        raise _DamageError("it was never a checkpoint")
    if whole:
        _parts(found, Path(path).absolute().parent)
    return found


@contextmanager
def refusing_damaged(path: str | Path) -> Iterator[None]:
    """Turn what reading a checkpoint raises in the block into a `ConfigError`; see `read_checkpoint`."""
    try:
        yield
    except Exception as error:  # a damaged file raises errors of many kinds
        if out_of_memory(error):
            raise
        whole = [str(other) for other in whole_checkpoints(Path(path).parent) if other != Path(path)]
        raise ConfigError(
            f"The checkpoint {path} cannot be read: {_wrong_with(path, error)}.",
            expected="a file that a run of lit-qrl wrote, whole",
            remedy=f"Whole ones beside it, the newest first: {listed(whole)}. Go on from that one with "
            f"--resume_if_possible true, from any with --ckpt_path {whole[0]}."
            if whole
            else "No other checkpoint beside it is whole.",
        ) from error


def _wrong_with(path: str | Path, error: Exception) -> str:
    """Return what is wrong with a checkpoint whose reading raised an error; torch advises to let it run code."""
    if isinstance(error, _DamageError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if found := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it holds {found[1]}, which is code and no data"
    if not Path(path).is_file():  # on another host
        return type(error).__name__
    if not Path(path).stat().st_size:
        return "it is empty"
    return "its records are damaged" if zipfile.is_zipfile(path) else "it is cut short, or was never a checkpoint"


def whole_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder that can be read, with all of their parts, the newest first."""
    found: list[tuple[int, float, Path]] = []
    for file in folder.glob("*.ckpt"):
        with suppress(Exception):  # whatever is wrong with it
            found.append((_read(file)["global_step"], file.stat().st_mtime, file))
    return [file for *_, file in sorted(found, reverse=True)]


class _DataReader(TorchCheckpointIO):
    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        with refusing_damaged(path):
            return super().load_checkpoint(path, weights_only=True)


def read_data_alone(strategy: Strategy) -> None:
    """Have a Trainer read of checkpoints what `read_checkpoint` does, whatever `weights_only` it is given.

    Args:
        strategy: of the Trainer; one with a `CheckpointIO` of the user's own keeps it.
    """
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = _DataReader()


def put_together(checkpoint: dict[str, Any], path: str | Path, optimizers: bool = True) -> None:
    """Put whole tensors, on the host, where a checkpoint had them divided; one without parts stays as it is.

    Args:
        checkpoint: as `read_checkpoint` returns it.
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
            named.add(_read(file, whole=False).get(FOLDER, ""))
        except Exception:  # of a damaged file it is not known what it names
            return
    for parts in folder.glob("parts-*"):
        if parts.name not in named:
            shutil.rmtree(parts, ignore_errors=True)
