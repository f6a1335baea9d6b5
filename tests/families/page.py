"""docs/models.md, from the cells that were measured and kept."""

import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.families.configs import FAMILIES, Family

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "docs" / "models"
DOCUMENT = ROOT / "docs" / "models.md"


def keep(family: Family, engine: str, cells: dict[str, Any]) -> None:
    """Write a row's cells beside those that are kept already."""
    path = KEPT / f"{family.model_type}.json"
    row = json.loads(path.read_text()) if path.exists() else {"name": family.name, "engines": {}}
    made = {name: _without_nothing(asdict(one)) for name, one in cells.items()}
    row["engines"][engine] = dict(sorted({**row["engines"].get(engine, {}), **made}.items()))
    path.write_text(json.dumps(row, indent=1) + "\n")


def _without_nothing(cell: dict[str, Any]) -> dict[str, Any]:
    return {key: _short(value) for key, value in cell.items() if value not in (None, "")}


def _short(value: Any) -> Any:
    return float(f"{value:.3g}") if isinstance(value, float) else value


def kept(family: Family) -> dict[str, dict[str, dict[str, Any]]]:
    """Return what is kept of a family: cells by engine and name."""
    path = KEPT / f"{family.model_type}.json"
    return json.loads(path.read_text())["engines"] if path.exists() else {}


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
ENGINES = {"transformers": "TransformersEngine", "vllm": "VLLMEngine, vLLM 0.32 on a CPU"}


def document() -> str:
    """Return the page with its tables made anew; what else it says stands there alone."""
    page, last = DOCUMENT.read_text(), "| family | command | tried |"
    begin, end = page.index(f"\n## {next(iter(ENGINES.values()))}\n"), page.index("\n## GGUF files\n")
    parts = [page[: begin - 1]]
    for engine, title in ENGINES.items():
        rows = [(family, kept(family).get(engine, {})) for family in FAMILIES]
        if not any(cells for _, cells in rows):
            continue
        columns = [key for key in METHODS if any(name.partition("/")[0] == key for _, cells in rows for name in cells)]
        parts.append(f"\n## {title}\n")
        heads = " | ".join(METHODS[key] for key in columns)
        parts.append(f"| family | {heads} |\n|{' --- |' * (len(columns) + 1)}")
        for family, cells in rows:
            if cells:
                shown = [_cell({n: c for n, c in cells.items() if n.partition("/")[0] == key}) for key in columns]
                parts.append(f"| {family.name} | {' | '.join(shown)} |")
        refused: dict[str, dict[str, list[str]]] = {}
        for family, cells in rows:
            for name, one in cells.items():
                method = METHODS.get(name.partition("/")[0])
                if one["state"] == "refused" and method is not None:
                    refused.setdefault(_general(one["text"]), {}).setdefault(family.name, []).append(method)
        parts += ["\nRefusals:\n"] * bool(refused)
        for text, where in sorted(refused.items(), key=lambda item: list(item[1])):
            methods = [title for title in METHODS.values() if any(title in given for given in where.values())]
            parts.append(f"- {', '.join(where)} ({', '.join(methods)}): {text}")
    parts.append(page[end : page.index(last)] + f"{last}\n| --- | --- | --- |")
    for family in FAMILIES:
        tried = kept(family).get("transformers", {}).get("command", {"state": "–"})
        why = f": {_general(tried['text'])}" if tried["state"] == "refused" else ""
        parts.append(f"| {family.name} | `{command(family)}` | {tried['state']}{why} |")
    return "\n".join(parts) + "\n"


def packaged() -> str:
    """Return what the page shows: states and reasons, each reason once, without figures."""
    reasons: dict[str, int] = {}
    lines = []
    for family in FAMILIES:
        engines: dict[str, Any] = {}
        for engine, cells in kept(family).items():
            cells = {name: one for name, one in cells.items() if name.partition("/")[0] in METHODS}
            works = [name for name, one in cells.items() if one["state"] == "works"]
            refused = {n: _general(one["text"]) for n, one in cells.items() if one["state"] == "refused"}
            numbered = {name: reasons.setdefault(text, len(reasons)) for name, text in refused.items()}
            engines[engine] = {"works": works, "refused": numbered}
        row = {"name": family.name, "type": family.model_type, "command": command(family), "engines": engines}
        lines.append(json.dumps(row))
    every = ",\n".join(json.dumps(text) for text in reasons)
    return '{"families": [\n' + ",\n".join(lines) + '\n],\n"reasons": [\n' + every + "\n]}\n"


def command(family: Family) -> str:
    """Return a newcomer's command for a family."""
    options = ["--model.policy.model", family.hub, *settings(family)]
    return " ".join(["lit-qrl fit --config configs/quickstart.yaml", *options])


def settings(family: Family) -> list[str]:
    """Return the options beside the model that a first run of a family needs."""
    options = ["--data.max_prompt_tokens", "64", "--model.optimizer.lr", "1e-6"]
    if family.kind == "state":
        options += ["--data.engine", "VLLMEngine"]
    if family.kind == "state" or family.model_type == "gpt2":
        options += ["--publisher.format", "bf16"]
    return options


def _cell(cells: dict[str, dict[str, Any]]) -> str:
    marks = []
    for name, one in sorted(cells.items(), key=lambda item: (item[1]["state"] != "works", item[0])):
        what = name.partition("/")[2]
        part = one.get("verified")
        share = "" if part is None or part > 0.9995 else f" ({math.floor(1000 * part) / 10:g} % verified)"
        shown = {"refused": f"~~{what or 'all'}~~", "failed": f"**{what} fails**", "works": (what or "works") + share}
        marks.append(shown[one["state"]])
    return ", ".join(marks) or "–"


def _general(text: str) -> str:
    """Return a refusal without what belongs to one model, one format or one command alone."""
    text = re.sub(r"/tmp/\S+/model", "the model", text)
    text = re.sub(r"^(fp8_row|fp8_tensor|int4_group|nvfp4) ", "The format ", text)
    text = re.sub(r"publisher\.format (fp8_row|fp8_tensor|int4_group|nvfp4)\b", "this publisher.format", text)
    text = re.sub(r"\b(experts in) (fp8_row|fp8_tensor|int4_group|nvfp4)\.", r"\1 this format.", text)
    text = re.sub(r"(--exclude|publisher\.exclude|the plugin's exclude)\b", "exclude", text)
    text = re.sub(r"(among its linear layers): .*?\. (?=[A-Z])", r"\1. ", text)
    text = re.sub(r"\b\d+% of", "a share of", text)
    return re.sub(r" Given: .*?\. (?=[A-Z])", " ", text)
