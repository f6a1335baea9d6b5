"""`docs/keys.md` is what the parser says; `python -m tests.test_keys` writes it again."""

import re
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lit_qrl.cli.training import FIRST_KEYS, GROUPS
from lit_qrl.objective import GRPO
from lit_qrl.policy import CausalPolicy
from lit_qrl.rollout import TransformersEngine, VLLMEngine
from tests.command_line import exists, fit_parser

PAGE = Path(__file__).parent.parent / "docs" / "keys.md"
CLASSES = {"model.policy": (CausalPolicy,), "model.objective": (GRPO,), "data.engine": (TransformersEngine, VLLMEngine)}
HEAD = """# Keys and defaults

Every key of `lit-qrl fit` but Lightning's own `trainer.*`, with its default. What tasks, precision plugins, callbacks
and other engines take is printed by `--data.task.help DatasetTask` and the like. In a YAML file `data.group_size` is
`group_size` under `data`, and what a class takes stands under its `init_args`; on the command line it is
`--data.group_size 8`. `lit-qrl fit --help` has them with their types, `lit-qrl fit --data.task.help DatasetTask` those
of any class. `python -m tests.test_keys` writes this page.

## A first run

"""


def table(rows):
    lines = [f"| `{key}` | {default} | {text} |" for key, default, text in rows]
    return "\n".join(["| key | default | meaning |", "| --- | --- | --- |", *lines])


def rows(actions, prefix=""):
    """Yield key, default and meaning of a parser's options, those that only print or hold others left out."""
    for action in actions:
        if not action.help or action.dest.endswith(("help", "config")) or action.help == "==SUPPRESS==":
            continue
        text = re.sub(r"\s*\((?:type|required|default).*", "", " ".join(action.help.split()), flags=re.DOTALL)
        default = action.default
        if isinstance(default, Namespace):
            default = default.class_path.rpartition(".")[2]
        shown = "" if default is None else f"`{str(default).lower() if isinstance(default, bool) else default}`"
        yield prefix + action.dest, "" if "<" in shown or "{" in shown else shown, text.replace("|", "\\|").rstrip(".")


def page():
    """Return the page."""
    (commands,) = (one for one in fit_parser()._actions if getattr(one, "_name_parser_map", None))
    fit = commands._name_parser_map["fit"]
    first = {key: (default, text) for key, default, text in rows(fit._actions)}
    parts = [table((key, first.get(key, ("", ""))[0], text) for key, text in FIRST_KEYS.items())]
    for group in GROUPS:
        own = [one for one in fit._actions if one.dest.startswith(f"{group}.")]
        parts.append(f"## {group}\n\n{table(rows(own))}")
        for place, kinds in CLASSES.items():
            for kind in kinds if place.startswith(f"{group}.") else ():
                parser = ArgumentParser()
                parser.add_class_arguments(kind)
                parts.append(f"### {place}: {kind.__name__}\n\n{table(rows(parser._actions, f'{place}.init_args.'))}")
    return HEAD + "\n\n".join(parts) + "\n"


def test_the_page_of_keys_is_what_the_parser_says():
    assert PAGE.read_text(encoding="utf-8") == page()


def test_what_the_help_begins_with_exists():
    assert all(exists(key) for key in FIRST_KEYS)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
