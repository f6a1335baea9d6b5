"""The files after `--config`, looked at before the parser, which does not say which of them it could not read."""

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lit_qrl.errors import ConfigError, listed

SHOWN = 6
"""Files that are listed as a choice."""


def config_files(args: Sequence[str]) -> Iterator[str]:
    """Yield what stands after every `--config` and `-c`.

    >>> list(config_files(["fit", "--config", "configs/quickstart.yaml", "-c=configs/correction/tis.yaml"]))
    ['configs/quickstart.yaml', 'configs/correction/tis.yaml']
    """
    for index, arg in enumerate(args):
        match = re.fullmatch(r"(?:--config|-c)(?:=(.*))?", arg, re.DOTALL)
        if match:
            yield match[1] or (args[index + 1] if index + 1 < len(args) else "")


def check_config_files(args: Sequence[str]) -> None:
    """Raise `ConfigError` for a `--config` that is no YAML file with keys; a URL, YAML in place and `-` may be."""
    for given in config_files(args):
        path = Path(given).expanduser()
        if given in ("", "-") or re.search(r"[{}\n]|://|: ", given):
            continue
        if path.is_dir():
            inside = [str(one) for one in _yaml_files(path)]
            raise ConfigError(
                "--config takes a file.",
                expected="a YAML file",
                given=f"the folder {given}",
                remedy=_choose(inside) if inside else "",
            )
        if not path.exists():
            raise ConfigError(f"--config: the file {given!r} does not exist.", remedy=_instead(path))
        _check_content(path)


def _check_content(path: Path) -> None:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
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


def _instead(path: Path) -> str:
    """Return the file that was meant: beside it, or one folder further down."""
    folder = path.parent
    while not folder.is_dir():
        folder = folder.parent
    present = {str(one): one for one in _yaml_files(folder)}
    names = {one.stem: text for text, one in reversed(present.items())}
    close = difflib.get_close_matches(path.stem, names, n=1)
    if close:
        return f"Did you mean {names[close[0]]!r}?"
    return _choose(list(present)) if present else "Check the path."


def _yaml_files(folder: Path) -> list[Path]:
    return [*sorted(folder.glob("*.y*ml")), *sorted(folder.glob("[!.]*/*.y*ml"))]


def _choose(files: Sequence[str]) -> str:
    return f"Choose one of {listed(files, SHOWN)}."
