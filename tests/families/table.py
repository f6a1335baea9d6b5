"""What every family does under every format, engine and method: each cell works, or is refused in a paragraph.

`python -m tests.families.table --families Qwen3 Falcon --engines transformers` measures some rows, keeps them in
`docs/models/` as JSON; `--write` writes `docs/models.md`, and what `lit-qrl models` shows, from all that are kept.
"""

import argparse
import contextlib
import copy
import io
import json
import logging
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from lit_qrl import formats
from lit_qrl.cli.audit import audit
from lit_qrl.cli.export import export
from lit_qrl.cli.models import MEASURED, METHODS
from lit_qrl.errors import ConfigError
from lit_qrl.loop.hooks import RLCallback
from lit_qrl.network.linears import fused_groups, quantizable_linears
from lit_qrl.network.stream import shared_amax
from lit_qrl.precision import NVFP4LoRA, QATAligned
from lit_qrl.publish.learner_scores import computing_as
from lit_qrl.quantize.folder import quantize_checkpoint
from lit_qrl.rollout.embedded.engine import TransformersEngine
from tests import tiny_run
from tests.families.configs import FAMILIES, Family, model_folder
from tests.families.vllm_cells import FORMATS as VLLM_FORMATS
from tests.families.vllm_cells import run_cell

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "docs" / "models"
DOCUMENT = ROOT / "docs" / "models.md"
FORMATS = ("auto", "bf16", "fp8_row", "fp8_tensor", "int4_group", "nvfp4")
"""Of the sampler; `auto` is the learner's own dtype."""
WEIGHT_ONLY = ("int4_group", "nvfp4")
EXACT = 1e-5
"""Largest |Δ log p| in fp32, in nats, between a sampler and a plain forward pass of the library."""
FLIPPED = 2e-3
"""Mean |Δ log p| under activations in 8 bits, of which last bits of fp32 may flip a code."""
ROUNDED = 0.03
"""Mean |Δ log p| where the two round differently, in bf16."""
LR = 2e-2
"""Of AdamW: a step moves every weight by a quarter of its spread, so that two publishes are far apart."""


@dataclass(frozen=True)
class Cell:
    """One cell of the table.

    Args:
        state: `works`, `refused` or `failed`.
        text: the refusal, or the error.
        difference: |Δ log p| of the sampler to a plain forward pass of the library, in nats.
        quantized: share of the parameters' bytes that is quantized.
        verified: share of the bytes that was read back.
        early: a refusal that came before weights were loaded.
    """

    state: str
    text: str = ""
    difference: float | None = None
    quantized: float | None = None
    verified: float | None = None
    early: bool | None = None


class Difference(AssertionError):
    """Two sides that should agree do not."""


class Witness(RLCallback):
    """Compares what the engine and the learner said of each rollout with a plain forward pass of the library.

    Args:
        format: that the sampler computes in, over the merged weights; None where the merged weights are what it has.
        bound: on the mean where the two round differently, or on the largest.
    """

    def __init__(self, format: Any = None) -> None:
        self.format = format
        self.sampler: list[torch.Tensor] = []
        self.learner: list[torch.Tensor] = []
        self.seen: list[torch.Tensor] = []
        self.exclude: tuple[str, ...] = ()

    @torch.no_grad()
    def on_rollout_end(self, trainer, module, batch):
        plugin = trainer.precision_plugin
        plain = reference(module.policy)
        rows = batch.select(torch.arange(4))
        expected = forward(plain, rows, self.format, getattr(plugin, "exclude", ()))
        mask = rows.mask
        self.sampler.append((rows.sampler_logprobs - expected)[mask].abs())
        module.policy.eval()
        with plugin.forward_context():
            own = module.policy(rows).logprobs
        module.policy.train()
        aligned = isinstance(plugin, QATAligned)
        self.learner.append((own - (expected if aligned else forward(plain, rows)))[mask].abs())
        self.seen.append(torch.cat([p.detach().flatten()[:64].float() for p in plain.parameters()]))


def reference(policy: Any) -> Any:
    """Return the library's own model with the policy's weights, adapters merged, in fp32 with eager attention."""
    config = copy.deepcopy(policy.config)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        weights = {name: tensor.float() for name, tensor in policy.named_weights()}
    unknown = network.load_state_dict(weights, strict=False).unexpected_keys
    assert not unknown, unknown
    network.tie_weights()
    return network.eval()


def forward(network: Any, batch: Any, format: Any = None, exclude: Any = ()) -> torch.Tensor:
    """Return the log-probs "b t" of the completions, one sequence at a time, without padding and without a cache."""
    width = batch.tokens.shape[1] - batch.mask.shape[1]
    scores = torch.zeros(batch.mask.shape)
    for row in range(len(batch)):
        start, length = width - int(batch.prompt_length[row]), int(batch.mask[row].sum())
        ids = batch.tokens[row, start : width + length][None]
        with computing_as(network, format, exclude):
            logits = network(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
        chosen = logits[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        scores[row, :length] = chosen[-length:]
    return scores


def sampler_format(name: str) -> Any:
    """Return the format of a sampler by the name that the table has for it."""
    # One activation scale per call would depend on what else is in a batch; vLLM has one per token too.
    return formats.get(name, activations="token") if name == "fp8_tensor" else name


def fitted(family: Family, folder: Path, format: str = "auto", lora: bool = False, plugin: Any = None):
    """Run two iterations, each with its publish, and return what the sampler was and the cell's figures."""
    model_folder(family, folder / "model")
    chosen = sampler_format(format)
    applied = plugin.format if isinstance(plugin, QATAligned) else None if format == "auto" else formats.get(chosen)
    witness = Witness(None if isinstance(applied, formats.Dense) else applied)
    made: Any = {"lora": LoraConfig(r=4, target_modules="all-linear")} if lora else {}
    trainer, module, data = tiny_run.build(
        folder,
        callbacks=[witness],
        policy=made,
        format=chosen,
        engine=TransformersEngine(),
        lr=LR,
        trainer={"plugins": [plugin]} if plugin is not None else {},
    )
    try:
        trainer.fit(module, datamodule=data)
    except ConfigError as error:
        return Cell("refused", str(error), early=module.policy.model is None)
    if len(witness.sampler) != 2 or torch.equal(*witness.seen):
        raise Difference("the run did not publish two different sets of weights")
    flips = FLIPPED if applied is not None and applied.quantizes_activations else EXACT
    bounds = {
        "sampler": ROUNDED if format == "bf16" else flips,
        "learner": flips if isinstance(plugin, QATAligned) else EXACT,
    }
    figures = {}
    for side, found in (("sampler", witness.sampler), ("learner", witness.learner)):
        difference = torch.cat(found)
        figures[side] = float(difference.max() if bounds[side] == EXACT else difference.mean())
        if not figures[side] <= bounds[side]:
            raise Difference(f"the {side}'s log-probs are {figures[side]:.2g} nats from a plain forward pass")
    told = json.loads((folder / "run" / "publish.json").read_text())
    shares = {key: told.get(f"{key}_share") for key in ("quantized", "verified")}
    return Cell("works", difference=figures["sampler"], **shares)


def quantized(family: Family, folder: Path, format: str) -> Cell:
    """Make a folder in a weight-only format; its codes are those of a publish."""
    source = Path(model_folder(family, folder / "model"))
    try:
        report = quantize_checkpoint(source, folder / format, formats.get(format))
    except ConfigError as error:
        return Cell("refused", str(error))
    return Cell("works", quantized=getattr(report, "quantized_share", None))


def exported(family: Family, folder: Path) -> dict[str, Cell]:
    """Train by the command line, export plainly, in bf16 and in formats, and load what was written."""
    from lit_qrl.cli.main import run_training

    rows = "".join(json.dumps({"question": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(12))
    (folder / "rows.jsonl").write_text(rows)
    options = {
        "model.policy": "CausalPolicy",
        "model.policy.model": model_folder(family, folder / "model"),
        "model.optimizer": "torch.optim.AdamW",
        "model.optimizer.lr": LR,
        "model.objective": "GRPO",
        "data.task": "DatasetTask",
        "data.task.path": str(folder / "rows.jsonl"),
        "data.task.chat": "false",
        "data.task.evaluation_size": 4,
        "data.task.rewards": json.dumps([{"class_path": "tests.tiny_run.DigitReward"}]),
        "data.engine": "TransformersEngine",
        "data.prompts_per_iteration": 4,
        "data.group_size": 4,
        "data.max_prompt_tokens": 8,
        "data.max_completion_tokens": 4,
        "trainer.accelerator": "cpu",
        "trainer.max_epochs": 1,
        "trainer.limit_val_batches": 0,
        "trainer.enable_progress_bar": "false",
        "trainer.default_root_dir": str(folder / "cli"),
    }
    try:
        run_training(["fit", *[part for key, value in options.items() for part in (f"--{key}", str(value))]])
    except ConfigError as error:
        return {"export/plain": Cell("refused", str(error))}
    return {
        f"export/{format or 'plain'}": cell(lambda format=format: _reloaded(folder, format))
        for format in (None, "bf16", *WEIGHT_ONLY)
    }


def _reloaded(folder: Path, format: str | None) -> Cell:
    """Export a run, and compare the logits of what was written with those of the run's policy."""
    from lit_qrl.cli.export import locate, restore

    output = folder / f"exported-{format}"
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            export(folder / "cli", output=output, format=format)
    except ConfigError as error:
        return Cell("refused", str(error))
    loaded: Any = AutoModelForCausalLM.from_pretrained(output, attn_implementation="eager").eval()
    half = loaded.dtype == torch.bfloat16
    policy = restore(*locate(folder / "cli", "last"))
    ids = torch.arange(2, 14)[None]
    with torch.no_grad():
        applied = None if format in (None, "bf16") else formats.get(format)
        plain = reference(policy)
        if applied is not None:
            _round_weights(plain, applied)
        plain = plain.to(loaded.dtype)
        expected = plain(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
        got = loaded(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
    difference = (got - expected).abs()
    figure = float(difference.mean() if half else difference.max())
    if not figure <= (ROUNDED if half else EXACT):
        raise Difference(f"the exported folder's log-probs are {figure:.2g} nats from the policy's")
    return Cell("works", difference=figure)


@torch.no_grad()
def _round_weights(network: Any, format: Any) -> None:
    """Put in place of each weight what its codes in a weight-only format stand for."""
    linears = quantizable_linears(network)
    for names in fused_groups(linears).values():
        parts = {name: linears[name].weight for name in names}
        shared = shared_amax(parts) if format.shares_amax and len(parts) > 1 else None
        rounded = {name: format.dequantize(format.quantize(part, shared)) for name, part in parts.items()}
        for name, weight in rounded.items():
            linears[name].weight.copy_(weight)


def audited(family: Family, folder: Path, chosen: tuple[str, ...] = FORMATS[1:]) -> Cell:
    """Audit all formats at once."""
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"question": f"{i}+1="}) + "\n" for i in range(4)))
    source = model_folder(family, folder / "model")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            audit(
                model=source,
                prompts=str(folder / "prompts.jsonl"),
                chat=False,
                formats=chosen,
                samples=2,
                completions=2,
                max_tokens=8,
            )
    except ConfigError as error:
        return Cell("refused", str(error))
    return Cell("works")


def cell(measure: Callable[[], Cell]) -> Cell:
    """Return a cell; any error that is no refusal is a failure."""
    try:
        return measure()
    except Exception as error:
        return Cell("failed", f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")


def through_vllm(family: Family, format: str) -> Cell:
    """Publish twice through vLLM; what no publish could verify, experts, is counted out of the verified share."""
    found = run_cell(family, "plain" if format == "auto" else format)
    if found["outcome"] in ("works", "refused"):
        shown = {key: found.get(key) for key in ("difference", "verified")}
        return Cell(found["outcome"], found.get("message", ""), **shown)
    return Cell("failed", f"{found['outcome']}: {found.get('message') or found}"[:400])


def methods(engine: str, chosen: tuple[str, ...]) -> dict[str, Callable[[Family, Path], Cell]]:
    """Return the columns of an engine by name, and how each is measured in a folder."""
    columns: dict[str, Callable[[Family, Path], Cell]] = {}
    if engine == "vllm":
        for format in chosen:
            if format == "auto" or format in VLLM_FORMATS:
                columns[f"publish/{format}"] = lambda family, folder, f=format: through_vllm(family, f)
        return columns
    for format in chosen:
        columns[f"fit/{format}"] = lambda family, folder, f=format: fitted(family, folder, f)
        columns[f"lora/{format}"] = lambda family, folder, f=format: fitted(family, folder, f, lora=True)
        if format not in ("auto", "bf16"):
            columns[f"qat/{format}"] = lambda family, folder, f=format: fitted(
                family, folder, plugin=QATAligned(sampler_format(f))
            )
        if format == "nvfp4":
            columns["nvfp4_lora/nvfp4"] = lambda family, folder: fitted(family, folder, lora=True, plugin=NVFP4LoRA())
        if format in WEIGHT_ONLY:
            columns[f"quantize/{format}"] = lambda family, folder, f=format: quantized(family, folder, f)
    columns["audit"] = audited
    return columns


def measured(
    family: Family, engine: str, chosen: tuple[str, ...] = FORMATS, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, Cell]:
    """Return the cells of one family under one engine, as many as are wanted by name."""
    if engine == "vllm" and family.vllm is None:
        return {"publish/auto": Cell("refused", "vLLM does not know this architecture. Use TransformersEngine.")}
    cells: dict[str, Cell] = {}
    with quiet():
        for name, measure in methods(engine, chosen).items():
            if wanted(name):
                with tempfile.TemporaryDirectory() as folder:
                    cells[name] = cell(lambda m=measure, f=folder: m(family, Path(f)))
        if engine == "transformers" and wanted("export/plain"):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    cells |= exported(family, Path(folder))
                except Exception as error:
                    cells["export/plain"] = Cell("failed", f"{type(error).__name__}: {str(error)[:400]}")
    return cells


@contextlib.contextmanager
def quiet():
    """Keep the libraries' logging and warnings out of the output."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def keep(family: Family, engine: str, cells: dict[str, Cell]) -> None:
    """Write a row's cells beside those that are kept already."""
    KEPT.mkdir(exist_ok=True)
    path = KEPT / f"{family.model_type}.json"
    row = json.loads(path.read_text()) if path.exists() else {"name": family.name, "engines": {}}
    kept = row["engines"].setdefault(engine, {})
    for name, one in cells.items():
        kept[name] = {key: _short(value) for key, value in asdict(one).items() if value not in (None, "")}
    row["engines"][engine] = dict(sorted(kept.items()))
    path.write_text(json.dumps(row, indent=1) + "\n")


def kept(family: Family) -> dict[str, dict[str, dict[str, Any]]]:
    """Return what is kept of a family: cells by engine and name."""
    path = KEPT / f"{family.model_type}.json"
    return json.loads(path.read_text())["engines"] if path.exists() else {}


ENGINES = {"transformers": "TransformersEngine", "vllm": "VLLMEngine, vLLM 0.32 on a CPU"}
HEAD = """# Models

What every family does, measured with models of its architecture at the smallest size (random weights; two layers, 128
wide). `python -m tests.families.table` measures the cells and keeps them in `docs/models/`, `--write` writes this page
from them, and `tests/families/test_table.py` measures a part of them again, all of them in `make test-slow`.

A format in a cell **works**: two iterations of training with two publishes far apart, each verified; the sampler's
log-probs are within 1e-5 nats, in fp32, of a plain forward pass of transformers (eager attention, no cache, no padding)
with the dequantized weights (mean below 0.002 under 8-bit activations, of which last bits may flip a code, and
below 0.03 in bf16); an export loads in transformers to the policy's logits. A struck-out format is **refused** in one
paragraph, given below. `auto` is the learner's dtype, here fp32; `–` was not measured.

Through vLLM, a format **works** when two sets of weights far apart were published one after the other, every layer was
compared, and the log-probs of its completions are, in the mean, within 1e-5 nats of the learner's eager forward pass in
fp32, and within 0.05 where a kernel of vLLM's rounds to bf16 or quantizes activations.
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
        parts.append("\nRefusals:\n")
        reasons: dict[str, list[str]] = {}
        for family, cells in rows:
            for name, one in cells.items():
                if one["state"] == "refused":
                    reasons.setdefault(_general(one["text"]), []).append(f"{family.name} {name}")
        for text, where in sorted(reasons.items()):
            families = list(dict.fromkeys(one.rpartition(" ")[0] for one in where))
            parts.append(f"- {', '.join(families)}: {text}")
    parts.append(COMMANDS)
    parts.append("| family | command |\n| --- | --- |")
    parts += [f"| {family.name} | `{command(family)}` |" for family in FAMILIES]
    return "\n".join(parts) + "\n"


def packaged() -> str:
    """Return what `lit-qrl models` shows: states and reasons, each reason once, without figures."""
    reasons: dict[str, int] = {}
    lines = []
    for family in FAMILIES:
        engines: dict[str, Any] = {}
        for engine, cells in kept(family).items():
            works = [name for name, one in cells.items() if one["state"] == "works"]
            refused = {n: _general(one["text"]) for n, one in cells.items() if one["state"] == "refused"}
            numbered = {name: reasons.setdefault(text, len(reasons)) for name, text in refused.items()}
            engines[engine] = {"works": works, "refused": numbered}
        row = {"name": family.name, "type": family.model_type, "command": command(family), "engines": engines}
        lines.append(json.dumps(row))
    every = ",\n".join(json.dumps(text) for text in reasons)
    return '{"families": [\n' + ",\n".join(lines) + '\n],\n"reasons": [\n' + every + "\n]}\n"


COMMANDS = """
## One command per family

Each trains on Countdown with a sampler of the family. Models of the hub could not be fetched where this is developed:
what was run is `lit-qrl fit` on the tiny model of each family, by the column `export`, and not on those named here.
"""


def command(family: Family) -> str:
    """Return a newcomer's command for a family."""
    options = ["--model.policy.model", family.hub, *settings(family)]
    return " ".join(["lit-qrl fit --config configs/quickstart.yaml", *options])


def settings(family: Family) -> list[str]:
    """Return the options beside the model that a first run of a family needs."""
    options = ["--data.max_prompt_tokens", "64"]
    if family.kind == "state":
        options += ["--data.engine", "VLLMEngine"]
    if family.kind == "state" or family.model_type == "gpt2":
        options += ["--publisher.format", "bf16"]
    return options


def _cell(cells: dict[str, dict[str, Any]]) -> str:
    marks = []
    for name, one in sorted(cells.items(), key=lambda item: (item[1]["state"] != "works", item[0])):
        what = name.partition("/")[2]
        shown = {"refused": f"~~{what or 'all'}~~", "failed": f"**{what} fails**", "works": what or "works"}
        marks.append(shown[one["state"]])
    return ", ".join(marks) or "–"


def _general(text: str) -> str:
    """Return a refusal without what belongs to one model alone."""
    text = re.sub(r"/tmp/\S+/model", "the model", text)
    text = re.sub(r"^(fp8_row|fp8_tensor|int4_group|nvfp4) ", "The format ", text)
    text = re.sub(r"\b\d+%", "…", text)
    return re.sub(r" Given: .*?\. (?=[A-Z])", " ", text)


def _short(value: Any) -> Any:
    return float(f"{value:.3g}") if isinstance(value, float) else value


def main(arguments: list[str] | None = None) -> int:
    """Measure what is asked for, print one line per cell, and return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="*", default=[family.name for family in FAMILIES])
    parser.add_argument("--engines", nargs="*", default=["transformers"], choices=["transformers", "vllm"])
    parser.add_argument("--formats", nargs="*", default=FORMATS, choices=FORMATS)
    parser.add_argument("--only", default="", help="cells whose name holds this")
    parser.add_argument("--missing", action="store_true", help="cells that are not kept yet")
    parser.add_argument("--dry", action="store_true", help="keep nothing")
    parser.add_argument(
        "--write",
        action="store_true",
        help="write the pages from what is kept",
    )
    given = parser.parse_args(arguments)
    failed = 0
    if given.write:
        DOCUMENT.write_text(document())
        MEASURED.write_text(packaged())
    for family in [] if given.write else [family for family in FAMILIES if family.name in given.families]:
        for engine in given.engines:
            if engine == "vllm" and len(given.families) > 1:  # an engine that dies takes its process with it
                options = ["--engines", "vllm", "--formats", *given.formats, "--only", given.only]
                command = [sys.executable, "-m", __spec__.name, "--families", family.name, *options]
                failed += subprocess.run(command + ["--dry"] * given.dry, check=False).returncode
                continue
            there = kept(family).get(engine, {}) if given.missing else {}
            wanted = lambda name, there=there: given.only in name and name not in there  # noqa: E731
            cells = measured(family, engine, tuple(given.formats), wanted)
            for name, one in cells.items():
                failed += one.state == "failed"
                figure = "" if one.difference is None else f"{one.difference:.1e}"
                when = " (late)" if one.early is False else ""
                print(f"{family.name:<20}{engine:<13}{name:<18}{one.state:<8}{when} {figure} {one.text}", flush=True)
            if not given.dry:
                keep(family, engine, cells)
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 125))
