"""What every family does under every format, engine and method: each cell works, or is refused in a paragraph.

`python -m tests.families.table --families Qwen3 Falcon --engines transformers` measures some rows, and keeps them in
`docs/models/` as JSON, a file for each family, so that several of these commands may run side by side; `--write` writes
`docs/models.md` from all that are kept.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM

from lit_qrl import formats
from lit_qrl.cli.audit import audit
from lit_qrl.cli.export import export
from lit_qrl.errors import ConfigError
from lit_qrl.formats.support import TABLE
from lit_qrl.network.experts import expert_stacks
from lit_qrl.network.structure import outline
from lit_qrl.policy import CausalPolicy
from lit_qrl.precision import NVFP4LoRA, QATAligned
from lit_qrl.quantize import quantize_checkpoint
from lit_qrl.rollout.embedded.engine import TransformersEngine
from tests import tiny_run
from tests.families.configs import FAMILIES, Family, model_folder, sized
from tests.families.page import DOCUMENT, ROOT, document, keep, kept, settings
from tests.families.vllm_cells import FORMATS as VLLM_FORMATS
from tests.families.vllm_cells import run_cell
from tests.families.witness import Difference, Witness, reference
from tests.stacked_experts import rounded

FORMATS = ("auto", "bf16", "fp8_row", "fp8_tensor", "int4_group", "nvfp4")
"""Of the sampler; `auto` is the learner's own dtype."""
WEIGHT_ONLY = ("int4_group", "nvfp4")
EXPORTED = (None, "bf16", *WEIGHT_ONLY)
EXPORTS = tuple(f"export/{format or 'plain'}" for format in EXPORTED)
EXACT = 1e-5
"""Largest |Δ log p| in fp32, in nats, between a sampler and a plain forward pass of the library."""
FLIPPED = 1e-2
"""Mean |Δ log p| under activations in 8 bits, of which last bits of fp32 may flip a code; half of the tokens are within
`EXACT` all the same, since a flip reaches no other completion."""
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
        usual = float(difference.median()) if bounds[side] == FLIPPED else 0.0
        if not (figures[side] <= bounds[side] and usual <= EXACT):
            off = f"{figures[side]:.2g} nats (half of them at least {usual:.2g})"
            raise Difference(f"the {side}'s log-probs are {off} from a plain forward pass")
    told = json.loads((folder / "run" / "publish.json").read_text())
    shares = {key: told.get(f"{key}_share") for key in ("quantized", "verified")}
    return Cell("works", difference=figures["sampler"], **shares)


def quantized(family: Family, folder: Path, format: str) -> Cell:
    """Make a folder in a weight-only format; its codes are those of a publish."""
    source = Path(model_folder(family, folder / "model"))
    report = quantize_checkpoint(source, folder / format, formats.get(format))
    return Cell("works", quantized=getattr(report, "quantized_share", None))


def exported(family: Family, folder: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Cell]]:
    """Train by the command line, export plainly, in bf16 and in formats, and load what was written."""
    from lit_qrl.cli.main import run_training

    def trained() -> Cell:
        run_training(tiny_run.command(folder, model_folder(family, folder / "model"), lr=LR, epochs=1))
        return Cell("works")

    run = cell(trained)
    for format, name in zip(EXPORTED, EXPORTS, strict=True):
        if wanted(name):
            yield name, cell(lambda format=format: _reloaded(folder, format)) if run.state == "works" else run


def _reloaded(folder: Path, format: str | None) -> Cell:
    """Export a run, and compare the logits of what was written with those of the run's policy."""
    from lit_qrl.cli.export import locate, restore

    output = folder / f"exported-{format}"
    with contextlib.redirect_stdout(io.StringIO()):
        export(folder / "run", output=output, format=format)
    loaded = _read(output, format)
    half = loaded.dtype == torch.bfloat16
    policy = restore(*locate(folder / "run", "last"))
    ids = torch.arange(2, 14)[None]
    with torch.no_grad():
        applied = None if format in (None, "bf16") else formats.get(format)
        plain = reference(policy)
        if applied is not None:
            plain = rounded(policy.config.model_type, plain, applied)
        plain = plain.to(loaded.dtype)
        expected = plain(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
        got = loaded(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
    difference = (got - expected).abs()
    figure = float(difference.mean() if half else difference.max())
    if not figure <= (ROUNDED if half else EXACT):
        raise Difference(f"the exported folder's log-probs are {figure:.2g} nats from the policy's")
    return Cell("works", difference=figure)


def _read(output: Path, format: str | None) -> Any:
    """Return the model of a folder; experts in a format that transformers misreads as `NVFP4LoRA` reads them."""
    outlined = outline(AutoConfig.from_pretrained(output))
    apart = format in WEIGHT_ONLY and bool(expert_stacks(outlined))
    if not apart or "transformers" in TABLE[str(format)].folder_experts:
        return AutoModelForCausalLM.from_pretrained(output, attn_implementation="eager").eval()
    policy = CausalPolicy(str(output), lora=LoraConfig(r=1, target_modules=["q_proj", "q_a_proj"]), dtype="bf16")
    policy.configure()
    NVFP4LoRA(formats.get(format)).configure_policy(policy)
    return policy.network.eval()


def audited(family: Family, folder: Path, chosen: tuple[str, ...] = FORMATS[1:]) -> Cell:
    """Audit all formats at once."""
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"question": f"{i}+1="}) + "\n" for i in range(4)))
    source = model_folder(family, folder / "model")
    prompts, sizes = str(folder / "prompts.jsonl"), {"samples": 2, "completions": 2, "max_tokens": 8}
    with contextlib.redirect_stdout(io.StringIO()):
        audit(model=source, prompts=prompts, chat=False, formats=chosen, **sizes)
    return Cell("works")


def commanded(family: Family, folder: Path) -> Cell:
    """Run one iteration by the newcomer's command of a family, on its tiny model."""
    from lit_qrl.cli.main import run_training

    family = sized(family) if family.kind == "state" else family
    sizes = {"data.prompts_per_iteration": 2, "data.group_size": 2, "data.evaluation_limit": 4, "trainer.max_epochs": 1}
    sizes |= {"trainer.default_root_dir": folder / "run", "trainer.check_val_every_n_epoch": 1}
    given = [*settings(family), *(part for key, value in sizes.items() for part in (f"--{key}", str(value)))]
    config = str(ROOT / "configs" / "quickstart.yaml")
    run_training(["fit", "--config", config, "--model.policy.model", model_folder(family, folder / "model"), *given])
    return Cell("works")


def cell(measure: Callable[[], Cell]) -> Cell:
    """Return a cell; any error that is no refusal is a failure."""
    try:
        return measure()
    except ConfigError as error:
        return Cell("refused", str(error))
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
    return {**columns, "audit": audited, "command": commanded}


def measured(
    family: Family, engine: str, chosen: tuple[str, ...] = FORMATS, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Cell]]:
    """Yield the cells of one family under one engine, as many as are wanted by name."""
    with quiet():
        for name, measure in methods(engine, chosen).items():
            if wanted(name):
                with tempfile.TemporaryDirectory() as folder:
                    yield name, cell(lambda m=measure, f=folder: m(family, Path(f)))
        if engine == "transformers" and any(map(wanted, EXPORTS)):
            with tempfile.TemporaryDirectory() as folder:
                yield from exported(family, Path(folder), wanted)


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


def main(arguments: list[str] | None = None) -> int:
    """Measure what is asked for, keep it, print one line per cell, and return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="*", default=[family.name for family in FAMILIES])
    parser.add_argument("--engines", nargs="*", default=["transformers"], choices=["transformers", "vllm"])
    parser.add_argument("--only", nargs="*", default=[""], help="cells whose name holds one of these")
    parser.add_argument("--missing", action="store_true", help="cells that are not kept yet")
    parser.add_argument("--write", action="store_true", help="write the pages from what is kept, and measure nothing")
    given = parser.parse_args(arguments)
    if given.write:
        DOCUMENT.write_text(document())
        return 0
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the table is of CPUs
    if "vllm" in given.engines:
        from lit_qrl.rollout.vllm.process import prepare_environment

        prepare_environment(deep_gemm=False, kv_cache_gib=None)
    failed = 0
    for family in (family for family in FAMILIES if family.name in given.families):
        for engine in given.engines:
            there = kept(family).get(engine, {}) if given.missing else {}

            def wanted(name: str, there: Any = there) -> bool:
                return name not in there and any(part in name for part in given.only)

            for name, one in measured(family, engine, wanted=wanted):
                figure = "" if one.difference is None else f"{one.difference:.1e}"
                when = " (late)" if one.early is False else ""
                line = f"{family.name:<20}{engine:<13}{name:<18}{one.state:<8}{when} {figure} {one.text}"
                print(line, file=sys.stderr, flush=True)
                keep(family, engine, {name: one})
                failed += one.state == "failed"
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 125))
