"""Safetensors folders, read and written a tensor at a time; a folder appears under its name when it is whole."""

import copy
import difflib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lit_qrl.errors import ConfigError, listed
from lit_qrl.network.hub import ask_hub, say
from lit_qrl.shipped import SHIPPED, shipped

INDEX = "model.safetensors.index.json"
GGUF = ".gguf"
SAME_MATRIX = 0.5
"""Two roundings of one matrix differ by less of its norm; those of two, by more than all of it."""
_SINGLE, _PARTIAL = "model.safetensors", "shard-{:05d}.partial"
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
# What is beside the weights of a model: config, tokenizer, chat template.
_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")

HUB_REMEDY = (
    "Correct the name, or fetch the model where the hub can be reached (`hf download NAME --local-dir FOLDER`) and "
    "give the folder."
)
"""Of a name that is no folder."""
FOLDER_REMEDY = "Copy or fetch the folder again, or name another one."

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def local_folder(source: str, revision: str | None = None) -> Path:
    """Return the folder of a model: the given one, or a copy of a hub repository.

    Args:
        source: a folder, also one that ships, a GGUF file, or a name on the hub.
        revision: branch, tag or commit on the hub.

    Raises:
        ConfigError: when there is none of them.
    """
    if (folder := _here(source)) is not None:
        return folder
    from huggingface_hub import snapshot_download

    ask_hub(f"the files of the model {source!r}")
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=list(_FILES)))
    except Exception as error:  # the library raises its own errors and those of the network
        raise ConfigError(
            f"The model {source!r} cannot be fetched.",
            expected="a folder that exists, or a name on the hub that can be reached from here",
            given=f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}",
            remedy=HUB_REMEDY,
        ) from error


def _here(name: str, what: str = "model") -> Path | None:
    """Return the folder that a name means, or None where it is one of the hub's.

    Raises:
        ConfigError: for a path to nothing: by its form, or as its parent is a folder.
    """
    folder = Path(shipped(name)).expanduser()
    if folder.is_dir():
        return folder
    if folder.suffix == GGUF and folder.is_file():
        return gguf_folder(folder)
    path = Path(name).expanduser()
    parents = [place / path.parent for place in (Path(), SHIPPED) if (place / path.parent).is_dir()]
    local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if not local and (path.parent == Path() or not parents):
        return None
    there = [entry.name for entry in parents[0].glob("[!.]*") if entry.is_dir()] if parents else []
    there = difflib.get_close_matches(path.name, there, len(there) or 1, cutoff=0)
    remedy = f"{path.parent} holds {listed(there, 8)}." if there else "Correct the path."
    hub = "" if local else f" If the hub's is meant, work in a folder without {str(path.parent)!r}."
    raise ConfigError(f"The {what} folder does not exist.", given=name, remedy=remedy + hub)


def resolve_model(name: str, weights: bool, what: str = "model") -> str:
    """Return the folder that `name` means, or `name` itself when it can only be a hub name; check a folder's files.

    Args:
        name: a folder, relative to the working directory or else one that ships, a GGUF file, or a name on the hub.
        weights: whether the folder must hold weights.
        what: `model` or `tokenizer`.

    Raises:
        ConfigError: for a folder that does not exist or lacks what it must hold.
    """
    if (folder := _here(name, what)) is None:
        ask_hub(f"the {what} {name!r}")
        return name
    if what == "tokenizer":
        if not any((folder / file).exists() for file in _TOKENIZER):
            raise ConfigError("The tokenizer folder has no tokenizer files.", given=folder)
        return str(folder)
    if not (folder / "config.json").exists():
        inside = sorted(str(one.parent) for one in folder.glob("*/config.json"))
        raise ConfigError(
            "The model folder has no config.json.",
            expected="a Hugging Face checkpoint",
            given=folder,
            remedy=f"Choose one of {listed(inside, 8)}." if inside else "Name the folder that holds it.",
        )
    if weights and not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        raise ConfigError(
            "The model folder has no weights.",
            expected=" or ".join(_WEIGHTS),
            given=folder,
            remedy="Add them, or set model.policy.random_weights for a benchmark.",
        )
    return str(folder)


class FolderReader:
    """Names, shapes and dtypes of a folder's tensors, read from the headers; tensors are read when asked for.

    Args:
        folder: with `model.safetensors`, or shards and their index.

    Raises:
        ConfigError: without safetensors, or for a shard or an index that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.bytes = 0
        self._files: dict[str, Path] = {}
        self._stored: dict[str, str] = {}
        for path in self._listed():
            self._read_header(path)

    def _listed(self) -> list[Path]:
        index = self.folder / INDEX
        if not index.is_file():
            if (self.folder / _SINGLE).is_file():
                return [self.folder / _SINGLE]
            raise ConfigError(
                f"The folder {self.folder} has no weights that can be read layer by layer.",
                expected=f"{_SINGLE}, or shards and {INDEX}",
                given=", ".join(sorted(path.name for path in self.folder.iterdir())[:8]) or "an empty folder",
                remedy="Save the model with save_pretrained, which writes safetensors.",
            )
        try:
            return sorted({self.folder / file for file in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{index} is no index of shards.", expected="JSON with a weight_map") from error

    def _read_header(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping
                    part = file.get_slice(name)
                    self._files[name] = path
                    self.shapes[name], self.dtypes[name] = tuple(part.get_shape()), part.get_dtype()
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"The shard {path} is missing, truncated or damaged: {str(error).rstrip('.')}.",
                remedy="Copy or download it again.",
            ) from error
        self.bytes += path.stat().st_size

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._files)

    def rename(self, stored: Mapping[str, str]) -> None:
        """Know all tensors by other names from here on.

        Args:
            stored: names in the files by those that they shall have (`network.experts.stored_names`).
        """
        self._stored = dict(stored)
        self.shapes = {name: self.shapes[other] for name, other in stored.items()}
        self.dtypes = {name: self.dtypes[other] for name, other in stored.items()}
        self._files = {name: self._files[other] for name, other in stored.items()}

    def stored(self, name: str) -> str:
        """Return the name that a tensor has in the files."""
        return self._stored.get(name, name)

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of a floating tensor of 16 bits or more, else None."""
        return _DTYPES.get(self.dtypes[name])

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return tensors by name; each shard is opened once and let go."""
        wanted = sorted(names, key=lambda name: str(self._files[name]))
        found: dict[str, Tensor] = {}
        for path, part in groupby(wanted, key=lambda name: self._files[name]):
            with safe_open(path, framework="pt") as file:
                found.update({name: file.get_tensor(self.stored(name)) for name in part})
        return found


class FolderWriter:
    """Writes tensors into shards as they come; `close` numbers them and writes the index.

    Args:
        folder: an existing folder.
        shard_bytes: largest shard; it is held in memory until it is written.
    """

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self.folder, self.shard_bytes = folder, shard_bytes
        self.bytes = 0
        self._pending: dict[str, Tensor] = {}
        self._held = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor, and write what has come together when the next would exceed the shard."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._held + size > self.shard_bytes:
            self._flush()
        # its own memory: a tensor that was read may lie in a mapped file as large as a shard
        own = tensor.detach().to("cpu", copy=True) if tensor.device.type == "cpu" else tensor.detach().cpu()
        self._pending[name] = own.contiguous()
        self._held += size
        self.bytes += size

    def _flush(self) -> None:
        save_file(self._pending, self.folder / _PARTIAL.format(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._held = {}, 0

    def close(self) -> None:
        """Write the rest and give the shards their names."""
        if self._pending:
            self._flush()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            file = _SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            path = self.folder / _PARTIAL.format(number)
            path.chmod(0o666 & self.folder.stat().st_mode)  # safetensors writes for the owner alone
            path.rename(self.folder / file)
            weight_map |= dict.fromkeys(names, file)
        if count == 1:
            return
        index = {"metadata": {"total_size": self.bytes}, "weight_map": weight_map}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def copy_side_files(source: Path, target: Path) -> None:
    """Copy tokenizer, generation config and whatever else is no weight; `config.json` and index are left out."""
    for path in sorted({path for pattern in _FILES for path in source.glob(pattern)}):
        if path.suffix != ".safetensors" and not path.name.endswith(".index.json") and path.name != "config.json":
            shutil.copyfile(path, target / path.name)


def refuse_existing(output: Path) -> None:
    """Raise `ConfigError` when `output` is a file, or a folder with something in it."""
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise ConfigError(
            f"The output {output} exists already.", expected="a folder that is new or empty", remedy="Name another."
        )


@contextmanager
def appearing(output: Path, needed_bytes: int = 0) -> Iterator[Path]:
    """Give a folder to write into, beside `output`, which takes its name at the end; an error leaves nothing.

    Args:
        output: the folder to make; it may exist when it is empty.
        needed_bytes: what will be written.

    Raises:
        ConfigError: when `output` exists, its disk has no room, or it cannot be written.
    """
    refuse_existing(output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(output.parent).free
        if free < needed_bytes:
            raise ConfigError(
                f"There is no room for {output}.",
                expected=f"{needed_bytes / 2**30:.1f} GiB of free disk",
                given=f"{free / 2**30:.1f} GiB",
                remedy="Name an output on another disk.",
            )
        partial = output.parent / f".{output.name}.partial-{token_hex(4)}"
        partial.mkdir()
    except OSError as error:
        raise _unwritable(output, error) from error
    try:
        yield partial
        os.replace(partial, output)
    except (OSError, SafetensorError) as error:
        raise _unwritable(output, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def gguf_folder(file: Path) -> Path:
    """Return the folder of a GGUF file's model, in the cache of the hub's library; it is made once.

    Its weights are multiplied out by transformers' own loader, in fp32, which renders them exactly; a dtype of `auto`
    takes the nearest bf16 on a GPU. Engines, `export` and whoever loads an adapter take the folder as any other.

    Args:
        file: with its tokenizer.

    Raises:
        ConfigError: without the package that reads such files, or for a file that it or transformers cannot read.
    """
    from filelock import FileLock
    from huggingface_hub import constants

    about = file.stat()
    key = blake2b(f"{file.resolve()} {about.st_size} {about.st_mtime_ns}".encode(), digest_size=6).hexdigest()
    folder = Path(constants.HF_HOME, "lit_qrl", f"{file.stem}-{key}")
    if folder.is_dir():  # maybe where nothing can be written
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # of several processes one makes it
        if not folder.is_dir():
            with appearing(folder) as partial:
                _multiply_out(file, partial)
            say(f"{file} is multiplied out into {folder}.")
    return folder


def _multiply_out(file: Path, folder: Path) -> None:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ConfigError(
            "GGUF files are read by the package gguf, which is not installed.",
            given=file,
            remedy="pip install 'lit-qrl[gguf]'",
        ) from error
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    try:
        reader = GGUFReader(file)
        held = {tensor.name: tensor for tensor in reader.tensors}
        where: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        tokenizer: Any = AutoTokenizer.from_pretrained(**where)
        loaded: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, output_loading_info=True)
        network, info = loaded
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise ConfigError(f"{file} cannot be read: {str(error).splitlines()[0]}", given=file) from error
    if absent := sorted(info["missing_keys"]):
        raise ConfigError(f"{file} lacks weights of its model.", expected=listed(absent, 3))
    embedding, head = network.get_input_embeddings(), network.get_output_embeddings()
    if "output.weight" in held and (embedding.weight - head.weight).norm() < SAME_MATRIX * head.weight.norm():
        # one matrix, tied, that the file holds twice: once in more bits
        better = max((held["token_embd.weight"], embedding), (held["output.weight"], head), key=lambda x: x[0].n_bytes)
        embedding.weight = head.weight = better[1].weight
        network.config.tie_word_embeddings = True
    names = ("eos", "eot", "bos", "padding")
    found = {name: reader.fields.get(f"tokenizer.ggml.{name}_token_id") for name in names}
    ids = {name: int(field.contents()) for name, field in found.items() if field is not None}
    special = {"eos": ids.get("eos"), "bos": ids.get("bos"), "pad": ids.get("padding")}
    for name, number in special.items():
        setattr(network.config, f"{name}_token_id", number)
        setattr(tokenizer, f"{name}_token", None if number is None else tokenizer.convert_ids_to_tokens(number))
    ends = sorted({ids[name] for name in ("eos", "eot") if name in ids})
    network.generation_config = GenerationConfig(
        eos_token_id=ends or None, bos_token_id=special["bos"], pad_token_id=special["pad"]
    )
    network.hf_quantizer = None  # nothing is quantized any more
    network.config.__dict__.pop("quantization_config", None)
    network.save_pretrained(folder)
    network.config.dtype = torch.bfloat16
    network.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _unwritable(output: Path, error: Exception) -> ConfigError:
    where, why = (getattr(error, name, None) for name in ("filename", "strerror"))
    return ConfigError(
        f"The output {output} cannot be written.",
        given=f"{where or output.parent}: {why or error}",
        remedy="Name a folder that can be written, on a disk with room.",
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json.

    Raises:
        ConfigError: when it is missing or no JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read.", expected="the config.json of a model", given=error) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no model config.", expected="a JSON object", given=type(config).__name__)
    return config


def write_plain(policy: Any, folder: Path, dtype: Any, shard_bytes: int) -> None:
    """Write the policy as a Hugging Face folder, an adapter merged, layer by layer.

    Args:
        policy: with its weights.
        folder: an existing folder.
        dtype: of floating tensors; None keeps the learner's.
        shard_bytes: largest shard.
    """
    from lit_qrl.network.names import stored

    writer = FolderWriter(folder, shard_bytes)
    with torch.no_grad():
        for name, tensor in policy.named_weights():
            if tensor.is_floating_point() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
                raise ConfigError(f"{name} of the checkpoint holds NaN or inf.", remedy="Take an earlier checkpoint.")
            tensor = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            for other, part in stored(policy.network, name, tensor).items():  # experts one by one
                writer.add(other, part)
    writer.close()
    config = copy.deepcopy(policy.network.config)
    config.dtype = dtype or own_dtype(policy)
    config.use_cache = True
    config.save_pretrained(folder)
    policy.network.generation_config.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


def own_dtype(policy: Any) -> Any:
    """Return the dtype of a policy's own weights, the first of which is no adapter's."""
    return next(one.dtype for one in policy.network.parameters() if one.is_floating_point())


def write_adapter(policy: Any, folder: Path) -> None:
    """Write the adapter as a PEFT folder that names the base it was trained over."""
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in policy.adapter_tensors().items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    lora = copy.copy(policy.lora)
    lora.base_model_name_or_path, lora.inference_mode = policy.source, True
    lora.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
