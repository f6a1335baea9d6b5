"""`lit-qrl models`: what every family of models does under every format, as it was measured for docs/models.md."""

import json
import re
import textwrap
from pathlib import Path
from typing import Any

from lit_qrl.errors import ConfigError, nearest

MEASURED = Path(__file__).with_name("models.json")
"""The cells of docs/models.md without their figures; `python -m tests.families.table --write` writes it."""
ENGINES = {"transformers": "TransformersEngine", "vllm": "VLLMEngine"}
METHODS = {
    "publish": "two publishes",
    "fit": "fit",
    "lora": "LoRA",
    "qat": "QATAligned",
    "nvfp4_lora": "NVFP4LoRA",
    "quantize": "quantize",
    "export": "export",
    "audit": "audit",
}
"""What was measured of an engine, by the first part of a cell's name; the second is a number format."""
WIDTH = 118


def models(*family: str) -> None:
    """Show which formats and methods work for every family of models; for a named family, also why the others do not.

    `auto` is the learner's dtype.

    Examples:
      lit-qrl models
      lit-qrl models Qwen3
      lit-qrl models "Gemma 3" gpt_oss

    Args:
        family: a name of the list, or a model_type of transformers, such as qwen3_moe.

    Raises:
        ConfigError: for a family that was not measured.
    """
    from rich.console import Console

    measured = json.loads(MEASURED.read_text())
    chosen = [_found(name, measured["families"]) for name in family]
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    for part in [_cells(one, measured["reasons"]) for one in chosen] or [_overview(measured["families"])]:
        console.print(*part, sep="\n", markup=False, soft_wrap=not console.is_terminal)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _found(name: str, families: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the family of a name or model type, whatever case and dashes it is written with."""
    known = {_plain(one[key]): one for key in ("type", "name") for one in families}
    if _plain(name) not in known:
        # A name of the hub has its family's in it, of which the longest is the nearest: Qwen3-MoE before Qwen3.
        within = max((one["name"] for one in families if _plain(one["name"]) in _plain(name)), key=len, default=None)
        meant = f"Did you mean {within!r}?" if within else nearest(name, [one["name"] for one in families])
        raise ConfigError(
            f"{name!r} is no family that was measured.",
            remedy=f"{meant} A model of another family may work all the "
            "same: `lit-qrl fit … --dry_run` says what is refused before weights are loaded.",
        )
    return known[_plain(name)]


def _table(*heads: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        table.add_column(head, no_wrap=head == "family")
    return table


def _formats(engine: dict[str, Any], method: str) -> str:
    """Return the formats of a method that work, `all` where no other was refused."""
    works = [name.partition("/")[2] for name in engine["works"] if name.partition("/")[0] == method]
    refused = any(name.partition("/")[0] == method for name in engine["refused"])
    return " ".join(works) if refused else "all" if works else ""


def _overview(families: list[dict[str, Any]]) -> list[Any]:
    """Return one line for each family."""
    table = _table("family", "formats of fit", "and of", "of VLLMEngine")
    nothing: dict[str, Any] = {"works": [], "refused": {}}
    for one in families:
        embedded, vllm = (one["engines"].get(engine, nothing) for engine in ENGINES)
        working = {name.partition("/")[0] for name in embedded["works"]} - {"fit"}
        others = [title for method, title in METHODS.items() if method in working]
        row = (_formats(embedded, "fit"), " ".join(others), _formats(vllm, "publish"))
        table.add_row(one["name"], *(text or "–" for text in row))
    return [table, "lit-qrl models FAMILY   shows the formats of each method, and why the others are refused"]


def _cells(family: dict[str, Any], reasons: list[str]) -> list[Any]:
    """Return what was measured of one family, and the reasons of refusals with what each refuses."""
    table, why = _table("engine", "method", "works", "refused"), dict[int, list[str]]()
    for key, engine in ((key, family["engines"][key]) for key in ENGINES if key in family["engines"]):
        for method, title in METHODS.items():
            named = {state: [n for n in engine[state] if n.partition("/")[0] == method] for state in engine}
            if any(named.values()):
                shown = (" ".join(n.partition("/")[2] or "all" for n in named[s]) for s in ("works", "refused"))
                table.add_row(ENGINES[key], title, *(text or "–" for text in shown))
            for name in named["refused"]:
                why.setdefault(engine["refused"][name], []).append(f"{title} {name.partition('/')[2]}".strip())
    parts = [f"{family['name']} ({family['type']})", table]
    for index, refused in why.items():
        text = f"{', '.join(refused)}: {reasons[index]}"
        parts.append(textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) + "\n")
    return [*parts, family["command"] + "\n"]
