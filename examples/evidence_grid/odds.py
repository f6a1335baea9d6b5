"""Fits what foretells a loss, by the rules of docs/studies/evidence.md, and judges it on runs that it has not seen.

    python examples/evidence_grid/odds.py                # odds.csv, odds.md and odds.png beside the grid's runs
    python examples/evidence_grid/odds.py --write        # and the models of `loss_models.py`

Reads `runs.csv` of the grid, and the ends of the earlier runs beside it.
"""

import argparse
import csv
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "evidence_study"), str(HERE.parent)]

import grid_table  # noqa: E402
import loss_odds  # noqa: E402

from lit_qrl.report.figures import COLORS, INK, prepare  # noqa: E402

SHIPPED = HERE.parents[1] / "docs" / "figures" / "evidence"
MODULE = HERE / "loss_models.py"
LATER_SEED, LATER = 12, {"w4a4", "mis", "sequence_mis", "fp8_cache", "fp8_block_cache", "cache14", "cache15"}
"""Of the grid: the first seed, and parts of arms, of the runs that came after the first fit."""
UNTOLD = {"tbpo", "aqn"}
"""Arms whose objective or noise the model's inputs do not know."""
RIDGE, BOOTSTRAPS, NEWTON_STEPS = 1.0, 10_000, 50
ODDS_FILE, TABLE_FILE, FIGURE_FILE = "odds.csv", "odds.md", "odds.png"
AUDIT = ("start", "token", "sequence")
DIGITS = 8
"""Of what is written of a model."""


@dataclass(frozen=True)
class Example:
    """A run, what its beginning shows, and whether it lost.

    Args:
        study: `runs` and `pilot` are the earlier ones.
        rate: of learning.
        arm: as in `study.toml`.
        seed: of everything.
        difference: of the learner's accuracy to its bf16 sampler's.
        inputs: of both models.
    """

    study: str
    rate: float
    arm: str
    seed: int
    difference: float
    inputs: dict[str, float]

    @property
    def lost(self) -> bool:
        """Whether it ended as far below as counts."""
        return self.difference <= -loss_odds.LOSS

    @property
    def position(self) -> str:
        """Of the dial."""
        return self.arm.split("+")[-3]

    @property
    def held_out(self) -> bool:
        """Whether it judges; the others fit."""
        return self.seed % 2 == 1

    @property
    def later(self) -> bool:
        """Whether it was run after the first fit."""
        return self.study == "grid" and (self.seed >= LATER_SEED or not LATER.isdisjoint(self.arm.split("+")))


def inputs_of(row: grid_table.Row) -> dict[str, float]:
    """Return the model's inputs of a line of `runs.csv`."""
    halves = [
        {
            metric: float(row[f"{name}_{half}"])
            for name, metric in grid_table.METRICS.items()
            if row[f"{name}_{half}"] is not None
        }  # type: ignore[arg-type]
        for half in grid_table.HALVES
    ]
    correction = str(row["arm"]).split("+")[-2]
    sequence = float("sequence" in correction or "geo" in correction)
    token = 0.0 if correction == "none" or "sequence" in correction else 1.0
    if "ais" in correction:
        token = grid_table.early(row, "alpha")
    start = loss_odds.audit_inputs(float(str(row["log_ratio_1"])), token, sequence)
    return loss_odds.early_inputs(*halves, token=token, sequence=sequence) | start


def examples_of(rows: Sequence[grid_table.Row], earlier: Path) -> list[Example]:
    """Return the runs of GRPO's plain learner under a low-precision sampler whose bf16 sampler's run is there.

    Args:
        rows: of the grid's `runs.csv`.
        earlier: folder with `runs.csv` and `pilot.csv` of the evidence study.
    """
    ends = {grid_table.key(row): row for row in rows if row["study"] == "grid"}
    for name in ("runs", "pilot"):
        with (earlier / f"{name}.csv").open(newline="") as file:
            for line in csv.DictReader(file):
                place = (name, float(line.get("rate") or 2e-4), line["arm"], int(line["seed"]))
                ends[place] = {"iterations": int(line["iterations"]), "learner": float(line["learner_accuracy"])}
    found = []
    for row in rows:
        arm, place = str(row["arm"]), grid_table.key(row)
        if arm.endswith(("bf16", "aligned")) or UNTOLD & set(arm.split("+")):
            continue
        control = grid_table.control_of(arm) if row["study"] == "grid" else f"{arm.split('+')[0]}+none+bf16"
        theirs = ends.get((row["study"], row["rate"], control, row["seed"]))
        if theirs is None or place not in ends:
            continue
        difference, inputs = grid_table.difference(ends[place], theirs), inputs_of(row)
        if difference is not None and all(math.isfinite(value) for value in inputs.values()):
            study, rate, seed = str(row["study"]), float(str(row["rate"])), int(str(row["seed"]))
            found.append(Example(study, rate, arm, seed, difference, inputs))
    return found


def fit(examples: Sequence[Example], names: Sequence[str]) -> loss_odds.LossModel:
    """Return the ridge-penalised logistic model of a loss, by Newton's method in fp64."""
    values = torch.tensor([[one.inputs[name] for name in names] for one in examples], dtype=torch.float64)
    center, spread = values.mean(dim=0), values.std(dim=0, correction=0).clamp(min=1e-12)
    x = torch.cat([(values - center) / spread, torch.ones(len(values), 1, dtype=torch.float64)], dim=1)
    y = torch.tensor([float(one.lost) for one in examples], dtype=torch.float64)
    penalty = RIDGE * torch.ones(len(names) + 1, dtype=torch.float64)
    penalty[-1] = 0.0
    weight = torch.zeros(len(names) + 1, dtype=torch.float64)
    for _ in range(NEWTON_STEPS):
        p = (x @ weight).sigmoid()
        gradient = x.T @ (p - y) + penalty * weight
        weight = weight - torch.linalg.solve((x * (p * (1 - p))[:, None]).T @ x + penalty.diag(), gradient)
    as_numbers = lambda tensor: tuple(float(f"{value:.{DIGITS}g}") for value in tensor.tolist())  # noqa: E731
    *slopes, constant = as_numbers(weight)
    ends = (values.amin(dim=0), values.amax(dim=0))
    return loss_odds.LossModel(
        tuple(names), *map(as_numbers, ends), as_numbers(center), as_numbers(spread), tuple(slopes), constant
    )


def auroc(scores: Sequence[float], losses: Sequence[bool]) -> float:
    """Return the probability that a run that lost has a higher score than one that did not; NaN without both kinds.

    The area under the receiver operating characteristic, ties counted half (Mann–Whitney's U over the pairs).

    >>> auroc([0.1, 0.4, 0.4, 0.9], [False, False, True, True])
    0.875
    """
    lost = [score for score, loss in zip(scores, losses, strict=True) if loss]
    kept = [score for score, loss in zip(scores, losses, strict=True) if not loss]
    if not lost or not kept:
        return math.nan
    wins = sum((one > other) + 0.5 * (one == other) for one in lost for other in kept)
    return wins / (len(lost) * len(kept))


def interval(scores: Sequence[float], losses: Sequence[bool], seed: int = 0) -> tuple[float, float]:
    """Return the 95 % interval of the AUROC over bootstraps of runs; those with one kind of run alone do not count."""
    rng, count, found = random.Random(seed), len(scores), []
    order = torch.tensor(scores, dtype=torch.float64)
    lost = torch.tensor(losses)
    wins = (order[:, None] > order).double() + 0.5 * (order[:, None] == order)
    for _ in range(BOOTSTRAPS):
        drawn = torch.bincount(torch.tensor(rng.choices(range(count), k=count)), minlength=count).double()
        ours, theirs = drawn * lost, drawn * ~lost
        pairs = float(ours.sum() * theirs.sum())
        if pairs:
            found.append(float(ours @ wins @ theirs) / pairs)
    found.sort()
    return found[int(0.025 * len(found))], found[int(0.975 * len(found))]


@dataclass(frozen=True)
class Judged:
    """One line of the table: what was judged, over how many runs, and how well it foretold."""

    name: str
    runs: int
    lost: int
    auroc: float
    low: float
    high: float


def judge(name: str, score: Callable[[Example], float], held_out: Sequence[Example]) -> Judged:
    """Return how well a score tells runs that lost from those that did not."""
    scores, losses = [score(one) for one in held_out], [one.lost for one in held_out]
    return Judged(name, len(losses), sum(losses), auroc(scores, losses), *interval(scores, losses))


def judged(examples: Sequence[Example]) -> tuple[list[Judged], dict[str, loss_odds.LossModel]]:
    """Return the table's lines, and the two models that are shipped."""
    names = [name for name in examples[0].inputs if name != "start"]
    fitted, held_out = ([one for one in examples if one.held_out is kind] for kind in (False, True))
    early, audit = fit(fitted, names), fit(fitted, AUDIT)

    def score(model: loss_odds.LossModel) -> Callable[[Example], float]:
        return lambda one: model.log_odds(one.inputs)

    old, new = ([one for one in examples if (one.study == "grid") is kind] for kind in (False, True))
    unseen: dict[int, float] = {}
    for position in sorted({one.position for one in examples}):
        model = fit([one for one in examples if one.position != position], names)
        unseen |= {id(one): model.log_odds(one.inputs) for one in examples if one.position == position}
    lines = [
        judge("first ten iterations", score(early), held_out),
        judge(
            "the same, runs within the fitted ranges",
            score(early),
            [one for one in held_out if not early.outside(one.inputs)],
        ),
        judge(
            "the same, fitted on the first runs alone, judged on all that were made since",
            score(fit([one for one in fitted if not one.later], names)),
            [one for one in examples if one.later],
        ),
        judge("mean abs. log-ratio alone", lambda one: one.inputs["start"], held_out),
        judge("with the correction: what `audit` knows", score(audit), held_out),
        judge("fitted on study and pilot, judged on the grid", score(fit(old, names)), new),
        judge("each position of the dial by a model without it", lambda one: unseen[id(one)], examples),
    ]
    return lines, {"audit": audit, "early": early}


def source_of(models: dict[str, loss_odds.LossModel], fitted: int) -> str:
    """Return the text of the module that ships the models."""
    lines = [
        '"""The fitted models of a loss: `AUDIT` takes what an audit measures, `EARLY` the first iterations of a run.',
        "",
        f"Fitted on {fitted} runs and written by `python examples/evidence_grid/odds.py --write`.",
        '"""',
        "",
        "from loss_odds import LossModel",
    ]
    for name, model in models.items():
        lines += ["", f"{name.upper()} = LossModel("]
        for field, value in asdict(model).items():
            if isinstance(value, tuple):
                entries = (f'        "{one}",' if isinstance(one, str) else f"        {one!r}," for one in value)
                lines += [f"    {field}=(", *entries, "    ),"]
            else:
                lines.append(f"    {field}={value!r},")
        lines.append(")")
    return "\n".join(lines) + "\n"


def draw(examples: Sequence[Example], models: dict[str, loss_odds.LossModel], path: Path) -> None:
    """Draw every held-out run: its difference to bf16 over the probability of a loss that each model gave."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ink = INK
    kinds = {"none": "no correction", "token": "weights by token", "sequence": "by sequence"}
    with rc_context({"font.size": 8.0, "font.family": "sans-serif"}):
        sheet = Figure((9.0, 3.2), dpi=150, facecolor=ink["paper"], layout="constrained")
        FigureCanvasAgg(sheet)
        for axes, (name, title) in zip(
            sheet.subplots(1, 2, sharey=True),
            {"early": "After ten iterations", "audit": "From |log-ratio| and correction alone"}.items(),
            strict=True,
        ):
            prepare(axes, title)
            for (kind, label), color in zip(kinds.items(), COLORS, strict=False):
                there = [one for one in examples if one.held_out and kind_of(one) == kind]
                xs = [models[name].probability(one.inputs) for one in there]
                axes.scatter(xs, [one.difference for one in there], s=14, color=color, alpha=0.7, label=label)
            axes.axhline(-loss_odds.LOSS, color=ink["faint"], linewidth=0.8)
            axes.set_xlabel("probability of a loss", fontsize=8, color=ink["faint"])
            axes.set_xlim(-0.03, 1.03)
        axes.legend(fontsize=7, frameon=False, labelcolor=ink["text"])
        sheet.axes[0].set_ylabel("learner's accuracy, to bf16", fontsize=8, color=ink["text"])
        sheet.savefig(path, facecolor=ink["paper"])


def kind_of(example: Example) -> str:
    """Return what corrects a run: `none`, `token` or `sequence`."""
    if example.inputs["sequence"]:
        return "sequence"
    return "token" if example.inputs["token"] else "none"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--earlier", type=Path, default=SHIPPED, help="results of the evidence study")
    parser.add_argument("--grid", type=Path, default=SHIPPED / "grid", help="folder of the grid's runs.csv")
    parser.add_argument("--out", type=Path, help="folder to write into (default: the grid's)")
    parser.add_argument("--write", action="store_true", help="ship the models")
    options = parser.parse_args(arguments)
    out = options.out or options.grid
    out.mkdir(parents=True, exist_ok=True)
    examples = examples_of(grid_table.read(options.grid / grid_table.RUNS_FILE), options.earlier)
    lines, models = judged(examples)
    with (out / ODDS_FILE).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["study", "rate", "arm", "seed", "held_out", "difference", "lost", "early", "audit"])
        for one in examples:
            odds = (f"{models[name].probability(one.inputs):.4g}" for name in ("early", "audit"))
            place = (one.study, f"{one.rate:g}", one.arm, one.seed)
            writer.writerow([*place, int(one.held_out), f"{one.difference:.4g}", int(one.lost), *odds])
    table = ["| foretold by | runs judged | that lost | AUROC | 95 % interval |", "| --- | --- | --- | --- | --- |"]
    table += [
        f"| {one.name} | {one.runs} | {one.lost} | {one.auroc:.3f} | {one.low:.3f}–{one.high:.3f} |" for one in lines
    ]
    right = fmean((models["early"].probability(one.inputs) > 0.5) == one.lost for one in examples if one.held_out)
    table += ["", f"{right:.0%} of the held-out runs are on the right side of one half."]
    (out / TABLE_FILE).write_text("\n".join(table) + "\n")
    draw(examples, models, out / FIGURE_FILE)
    print("\n".join(table))
    if options.write:
        MODULE.write_text(source_of(models, sum(not one.held_out for one in examples)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
