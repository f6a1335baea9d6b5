"""`docs/keys.md` is what the parser says; `python -m tests.test_keys` writes it again."""

import re
from importlib import import_module
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lit_qrl.callbacks.defaults import FORCED
from lit_qrl.cli.training import FIRST_KEYS, GROUPS, classes_at
from tests.command_line import exists, fit_parser

PAGE = Path(__file__).parent.parent / "docs" / "keys.md"
PLACES = {
    "model.policy": ["CausalPolicy"],
    "model.objective": ["GRPO"],
    "data.task": ["DatasetTask"],
    "data.task.init_args.rewards": ["MathReward", "FunctionReward"],
    "data.engine": ["TransformersEngine", "VLLMEngine"],
    "trainer.plugins": ["PackedLoRA"],
    "trainer.callbacks": ["TruncatedIS", "MaskedIS", "AIS"],
    "trainer.strategy": [],
}
"""Where a class is chosen, and the classes that come first there; others are compared with them."""
SHARED = 4
"""Rows from which on a class points to another that has them too."""
HEAD = """# Keys and defaults

Every key of `lit-qrl fit` but Lightning's own `trainer.*`, with its default. In a YAML file `data.group_size` is
`group_size` under `data`, and what a class takes stands under its `init_args`; on the command line it is
`--data.group_size 8`. `lit-qrl fit --help` prints the same with types, `lit-qrl fit --data.task.help DatasetTask` what
a class takes. Under each class stands from where Python imports it; `class_path` takes that
or the name alone. `python -m tests.test_keys` writes this page.

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
        shown = "" if default in (None, "") else f"`{str(default).lower() if isinstance(default, bool) else default}`"
        yield prefix + action.dest, "" if "<" in shown or "{" in shown else shown, text.replace("|", "\\|").rstrip(".")


def classes(place):
    """Return the classes of this library at a place; what every run has is a group of its own."""
    found = [one for one in classes_at(place.rpartition(".")[2]).values() if one.__module__.startswith("lit_qrl")]
    own = {one.__name__: one for one in found if one not in FORCED.values()}
    return [own[name] for name in (*PLACES[place], *sorted({*own} - {*PLACES[place]}))]


def link(place, kind):
    anchor = f"{place}-{kind.__name__}".lower().replace(".", "")
    return f"[{kind.__name__}](#{anchor})"


def room(kind):
    """Return the shortest package from which a class is imported."""
    parts = kind.__module__.split(".")
    packages = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return next(one for one in packages if getattr(import_module(one), kind.__name__, None) is kind)


def class_sections(place):
    """Yield for each class what it is, and what it takes beside all that a class before it takes alike."""
    before = {}
    for kind in classes(place):
        parser = ArgumentParser()
        parser.add_class_arguments(kind)
        taken = list(rows(parser._actions, f"{place}.init_args."))
        like = max(before, key=lambda one: len({*before[one]} & {*taken}), default=None)
        texts = {key: text for key, _, text in before.get(like, ())}
        taken = [(key, one, texts.get(key, text) if text.startswith("see `") else text) for key, one, text in taken]
        alike = [row for row in taken if row in before.get(like, ())]
        if len(alike) < SHARED:
            alike = []
        before[kind] = taken
        yield f"### {place}: {kind.__name__}\n\n`{room(kind)}.{kind.__name__}`: {kind.__doc__.splitlines()[0]}"
        if own := [row for row in taken if row not in alike]:
            yield table(own)
        if alike:
            names = ", ".join(f"`{key.rpartition('.')[2]}`" for key, *_ in alike)
            yield f"As {link(place, like)}: {names}."


def page():
    """Return the page."""
    (commands,) = (one for one in fit_parser()._actions if getattr(one, "_name_parser_map", None))
    fit = commands._name_parser_map["fit"]
    first = {key: (default, text) for key, default, text in rows(fit._actions)}
    contents = [f"| `{place}` | {' · '.join(link(place, kind) for kind in classes(place))} |" for place in PLACES]
    parts = ["\n".join(["| class at | |", "| --- | --- |", *contents]), "## A first run"]
    parts.append(table((key, first.get(key, ("", ""))[0], text) for key, text in FIRST_KEYS.items()))
    for group in (*GROUPS, "trainer"):
        parts.append(f"## {group}")
        own = [one for one in fit._actions if one.dest.startswith(f"{group}.")]
        parts.append(table(rows(own)) if group != "trainer" else "What this library has for Lightning's Trainer.")
        parts += [part for place in PLACES if place.startswith(f"{group}.") for part in class_sections(place)]
    return HEAD + "\n\n".join(parts) + "\n"


def test_the_page_of_keys_is_what_the_parser_says():
    assert PAGE.read_text(encoding="utf-8") == page()


def test_what_the_help_begins_with_exists():
    assert all(exists(key) for key in FIRST_KEYS)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
