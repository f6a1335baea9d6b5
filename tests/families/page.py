"""docs/models.md, which `lit-qrl models` shows, from the cells that were measured and kept."""

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
HEAD = """# Models

What works for which family of models, measured on models of each architecture at the smallest size (random weights; two
layers, 128 wide). `python -m tests.families.table` measures the cells and keeps them in `docs/models/`; `--write`
writes this page from them. `tests/families/test_table.py` repeats a part of them, `make test-slow` all.

A format in a cell **works**: two iterations of training with two publishes far apart, each verified; the sampler's
log-probs are within 1e-5 nats, in fp32, of a plain forward pass of transformers (eager attention, no cache, no padding)
with the dequantized weights; an export loads in transformers to the policy's logits. In bf16 the mean is below 0.03.
Under 8-bit activations last bits may flip a code: half of the tokens are within 1e-5, and all of them below 0.01 in the
mean. A struck-out format is **refused** with the message given below. `auto` is the learner's dtype, here fp32; `–` was
not measured.

A checkpoint of gpt-oss whose experts are in its own MXFP4 is read as plain weights, on every device the same ones: bit
for bit what this project's `mxfp4` stands for.

Through vLLM, a format **works** when two sets of weights far apart were published one after the other, every layer was
compared, and the log-probs of its completions are, in the mean, within 1e-5 nats of the learner's eager forward pass in
fp32; where vLLM rounds to bf16 or quantizes activations, within 0.05, or twice what the learner's own forward pass in
bf16 differs by, if that is more. Every tensor was verified unless a share is given. Models that take pictures, and
Qwen3.5, need torchvision beside vLLM, whose build on the package index loads with CUDA's torch alone; linear attention
has kernels for bf16 alone on a CPU.

What the checks of a publish are worth is tested for every family that works: between two publishes one optimizer step
apart, the last tensor of every kind (each expert's among them) is kept back, and matrices of one shape are exchanged;
each must be named. `tests/families/test_injection.py` does so embedded, plain, in `fp8_row` and in `int4_group`, and
`tests/families/test_vllm_injection.py` through vLLM, in `auto`, and in `fp8_row` in `make test-slow`.
"""


def document() -> str:
    """Return the page."""
    parts = [HEAD]
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
    parts.append(COMMANDS)
    parts.append("| family | command | tried |\n| --- | --- | --- |")
    for family in FAMILIES:
        tried = kept(family).get("transformers", {}).get("command", {"state": "–"})
        why = f": {_general(tried['text'])}" if tried["state"] == "refused" else ""
        parts.append(f"| {family.name} | `{command(family)}` | {tried['state']}{why} |")
    return "\n".join(parts) + "\n"


COMMANDS = """
## GGUF files

`model.policy.model` and `lit-qrl quantize --model` take a `.gguf` file with its tokenizer (`pip install
'lit-qrl[gguf]'`). transformers' own loader multiplies it out, once, into a folder of fp32 in the cache of the hub's
library, which engines, `export` and adapters take as any other; on a GPU `dtype: auto` takes the nearest bf16. A tied
matrix that the file holds twice is taken in its greater number of bits. End and padding token are those that the file
names.

## One command per family

Each trains on Countdown with a sampler of the family, at a rate for a model of the hub: the quickstart's own, 3e-4, is
its small policy's. Models of the hub could not be fetched where this is developed:
what was **tried** is one iteration of each command with a model of the family at the smallest size in place of the
hub's, which this makes (the files of `docs/models/` have the types as their names):

```bash
python -m tests.families.configs qwen3 out/qwen3
lit-qrl fit --config configs/quickstart.yaml --model.policy.model out/qwen3 --data.max_prompt_tokens 64 \\
    --model.optimizer.lr 1e-6 --trainer.max_epochs 1
```
"""


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
