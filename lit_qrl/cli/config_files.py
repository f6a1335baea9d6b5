"""The files after `--config`, looked at before the parser, which does not say which of them it could not read."""

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from lit_qrl.errors import ConfigError, listed
from lit_qrl.shipped import SHIPPED, shipped

_OPTION = re.compile(r"(?:--config|-c)(?:=(.*))?", re.DOTALL)
_NO_FILE = re.compile(r"^-?$|[{}\n]|://|: ")
"""What may stand after `--config` in place of a file: a URL, YAML, and `-`."""
SHOWN = 6
"""Files that are listed as a choice."""


def config_files(args: Sequence[str]) -> Iterator[str]:
    """Yield what stands after every `--config` and `-c`.

    >>> list(config_files(["fit", "--config", "configs/quickstart.yaml", "-c=configs/correction/tis.yaml"]))
    ['configs/quickstart.yaml', 'configs/correction/tis.yaml']
    """
    for index, arg in enumerate(args):
        match = _OPTION.fullmatch(arg)
        if match:
            yield match[1] or (args[index + 1] if index + 1 < len(args) else "")


def found(given: str) -> str:
    """Return what stands after `--config`, or the file that ships by that name where the working directory has none."""
    return given if _NO_FILE.search(given) else shipped(given)


def expanded(args: Sequence[str]) -> list[str]:
    """Return the arguments with every file that only lists others, under `config`, replaced by those it lists.

    Paths are relative to the file that lists them, and each file overrides those before it, as on the command line. A
    file that ships is named by where it lies.

    Raises:
        ConfigError: a file is missing or no YAML, lists itself, or holds other keys beside its list.
    """
    given, replaced = iter(args), []
    for arg in given:
        match = _OPTION.fullmatch(arg)
        parts = [arg] if match is None or match[1] else [arg, *islice(given, 1)]
        named = match[1] or "".join(parts[1:]) if match else ""
        files = _listed(named, ())
        replaced += parts if files == [named] else [part for file in files for part in ("--config", file)]
    return replaced


def _listed(named: str, trail: tuple[str, ...]) -> list[str]:
    """Return the files that a file lists, through all levels, or itself when it lists none."""
    given = found(named)
    if _NO_FILE.search(given):
        return [given]
    path = Path(given).expanduser()
    if path.is_dir():
        inside = [os.path.join(named, one.relative_to(path)) for one in _yaml_files(path)]
        raise ConfigError(
            "--config takes a file.",
            expected="a YAML file",
            given=f"the folder {named}",
            remedy=_choose(inside) if inside else "",
        )
    if not path.exists():
        raise ConfigError(f"--config: the file {named!r} does not exist.", remedy=_instead(path))
    content = _content(path)
    if content is None or not isinstance(content.get("config"), list):
        return [given]
    if len(content) > 1 or given in trail:
        raise ConfigError(
            f"--config: {given} {'lists itself' if given in trail else 'lists files and holds other keys too'}.",
            expected="files under `config`, and nothing else",
            given=", ".join(trail if given in trail else content),
            remedy="Move the other keys to a file of their own, and list it last.",
        )
    files = [os.path.normpath(path.parent / str(one)) for one in content["config"]]
    return [one for file in files for one in _listed(file, (*trail, given))]


def _content(path: Path) -> dict[str, Any] | None:
    import yaml

    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        _lines(node, path)
        content = None if node is None else loader.construct_document(node)
    except OSError as error:
        raise ConfigError(f"--config: {path} cannot be read.", given=error.strerror) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config: {path} is not YAML.", expected="text", given="other bytes") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(
            f"--config: {path}{where} is not YAML: {problem}.",
            expected="keys and values such as `trainer: {max_epochs: 20}`",
            remedy="Correct the file, or name another.",
        ) from error
    if content is not None and not isinstance(content, dict):
        raise ConfigError(
            f"--config: the file {path} holds no keys.",
            expected="YAML such as `data: {group_size: 8}`",
            given=" ".join(str(content).split())[:60],
        )
    return content


def _lines(node: Any, file: str | Path, above: str = "") -> dict[str, int]:
    """Return the line of every key by its name on the command line; items of a list stand for what holds them.

    Raises:
        ConfigError: for a key that stands twice in one place, of which YAML takes the last in silence.
    """
    lines: dict[str, int] = {}
    own: dict[str, int] = {}
    for key, value in node.value if getattr(node, "id", "") == "mapping" else ():
        line, word = key.start_mark.line + 1, str(key.value)
        if word in own:
            raise ConfigError(
                f"--config: {file} holds the key {word!r} twice in one place.",
                expected="each key once, with all that belongs to it",
                given=f"lines {own[word]} and {line}, of which the second would replace the first",
                remedy="Put them together.",
            )
        own[word] = line
        name = above if word in ("init_args", "dict_kwargs") else f"{above}.{word.removesuffix('+')}".lstrip(".")
        lines |= {**_lines(value, file, name), name: line}
    for item in node.value if getattr(node, "id", "") == "sequence" else ():
        lines = {**_lines(item, file, above), **lines}
    return lines


_KEY = re.compile(r"(?:([\w.]+): )?(?:there is no option '([\w.]+)')?")
"""How an error names the key that it is about."""


def located(error: ConfigError, args: Sequence[str]) -> ConfigError:
    """Return an error of the parser with the file and the line that it is about, where the key is from a file.

    Args:
        error: that begins with its key.
        args: of the command line.
    """
    import yaml

    found = _KEY.match(str(error))
    key = ".".join(filter(None, found.groups())) if found else ""
    if not key or any(re.sub(r"\.(init_args|dict_kwargs)\b", "", arg).startswith(f"--{key}") for arg in args):
        return error
    for file in reversed([*config_files(expanded(args))]):
        if not _NO_FILE.search(file):
            node = yaml.compose(Path(file).expanduser().read_text(encoding="utf-8"), yaml.SafeLoader)
            if line := _lines(node, file).get(key):
                return ConfigError(f"{file}, line {line}: {error}")
    return error


def _instead(path: Path) -> str:
    """Return the file that was meant: beside it, or one folder further down, or one that ships."""
    present = _near(path)
    for near in (present, [] if path.is_absolute() else [one.relative_to(SHIPPED) for one in _near(SHIPPED / path)]):
        names = {one.stem: str(one) for one in reversed(near)}
        if close := difflib.get_close_matches(path.stem, names, n=1):
            return f"Did you mean {names[close[0]]!r}?"
    return _choose([str(one) for one in present]) if present else "Check the path."


def _near(path: Path) -> list[Path]:
    folder = path.parent
    while not folder.is_dir():
        folder = folder.parent
    return _yaml_files(folder)


def _yaml_files(folder: Path) -> list[Path]:
    return [*sorted(folder.glob("*.y*ml")), *sorted(folder.glob("[!.]*/*.y*ml"))]


def _choose(files: Sequence[str]) -> str:
    return f"Choose one of {listed(files, SHOWN)}."


def run_folder_name(args: Sequence[str]) -> str:
    """Return the name under `runs/`: the first configuration file's, without the dots that would lead elsewhere.

    >>> run_folder_name(["fit", "--config", "configs/quickstart.yaml", "-c=configs/correction/tis.yaml"])
    'quickstart'
    """
    first = next(config_files(args), "")
    return Path(first).stem.strip(".") or "run"
