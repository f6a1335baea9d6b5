"""Writes the tables of docs/studies/evidence.md from its CSVs, and says where the page's text disagrees.

python examples/evidence_tables.py            # from docs/figures/evidence
python examples/evidence_tables.py --check    # change nothing; 1 where the page is not what the CSVs give
"""

import argparse
import csv
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

HERE = Path(__file__).resolve().parent
FOLDERS = ("evidence_grid", "evidence_study", "long_reasoning", "mismatch_dial", "")
sys.path[:0] = [str(HERE / name) for name in FOLDERS]

import arms as long_reasoning  # noqa: E402
import grid_table  # noqa: E402
import summary  # noqa: E402
from study_report import detectable, standard_error  # noqa: E402

PAGE = HERE.parent / "docs" / "studies" / "evidence.md"
SHIPPED = PAGE.parents[1] / "figures" / "evidence"
BEGIN, END = "<!-- examples/evidence_tables.py writes {} -->\n", "<!-- end -->\n"
Cells = Sequence[str]

CORRECTIONS = {"none": "none", "tis": "TIS", "ais": "AIS", "sequence_tis": "sequence TIS"}
LEVELS = (4, 6, 8, 10, 12, 13)
STUDY_LEVEL = 10
"""The position of the dial whose runs are the study's, taken at the grid's length."""
STUDY_UNTIL = 80
NAMES = {
    "s1+none+fp8_block": "the policy that ships: `fp8_block`",
    "s1+none+int4": "`int4_group`",
    "s1+none+nvfp4": "`nvfp4`",
    "s1+none+mxfp4": "`mxfp4`",
    "s1+none+w4a8": "INT4 with FP8 activations",
    "s1+none+w4a4": "NVFP4 of weights and activations",
    "s4+none+w4a4": "the same, dial at 4",
    "s1+none+fp8_cache": "an FP8 KV cache",
    "s1+none+fp8_block_cache": "`fp8_block` and an FP8 KV cache",
    **{
        f"s1+{arm}+cache{power}": f"an FP8 KV cache, too wide by {told}: {name}"
        for power, told in ((14, "2¹⁴"), (15, "2¹⁵"))
        for arm, name in CORRECTIONS.items()
    },
    "s1+aqn+bf16": "a bf16 sampler with noise (AQN)",
    "s1+aqn+nvfp4": "`nvfp4` with noise",
    "s8+aqn+int4": "dial at 8: `int4_group` with noise",
    **{f"s{scale}+tbpo+int4": f"TBPO, dial at {scale}" for scale in (6, 8, 10)},
    **{f"s4+{arm}+int3": f"INT3: {CORRECTIONS[arm]}" for arm in ("none", "ais", "sequence_tis")},
    "s4+none+int3_aligned": "INT3: `QATAligned`",
    **{
        f"s{scale}+{arm}+int4": f"dial at {scale}: {name}"
        for scale in (6, 8, 12)
        for arm, name in (
            ("mis", "MIS"),
            ("sequence_mis", "sequence MIS"),
            ("geo_wide", "Geo-RS in [0.9, 1.1] with TIS"),
            ("ais_geo", "the same with AIS"),
        )
    },
    "s10+none+int4": "dial at 10: none, four updates",
    **{
        f"{part}+s10+{arm}+int4": f"{updates}, to a bf16 sampler with as many: {name}"
        for part, updates in (("one_update", "one update"), ("eight_updates", "eight updates"))
        for arm, name in CORRECTIONS.items()
    },
    "s10+geo+int4": "dial at 10: Geo-RS in [0.99, 1.01] with TIS",
    "s10+geo_wide+int4": "Geo-RS in [0.9, 1.1] with TIS",
    "s10+ais_geo+int4": "Geo-RS in [0.9, 1.1] with AIS",
    "s10+ais+int4": "AIS",
    "s10+ais_always+int4": "AIS without necessity",
    "s10+ais_undamped+int4": "AIS without damping",
    "s10+tis5+int4": "AIS without a gate (TIS at 5)",
    **{
        f"slow+s{scale}+{arm}+int4": f"half the rate, dial at {scale}: {CORRECTIONS[arm]}"
        for scale in (8, 10, 12)
        for arm in ("none", "tis", "sequence_tis")
    },
    "adam_eps+s10+none+int4": "dial at 10, none: ε = 10⁻⁸, to a bf16 sampler with it",
    "decay+s10+none+int4": "a weight decay of 0.1, likewise",
}
"""The arms of the grid's second table, in its order."""
HABITS = {
    "s10": "none: the first setting",
    "cosine": "rate falling to zero",
    "one_update": "one update per rollout",
    "unscaled": "advantages not divided",
}
FORETOLD = {
    "first ten iterations": "the first ten iterations",
    "the same, runs within the fitted ranges": "the same, runs within the fitted ranges, where the guard speaks",
    "the same, fitted on the first runs alone, judged on all that were made since": (
        "the same, fitted on the first 56 runs alone, judged on all that were made since"
    ),
    "mean abs. log-ratio alone": "mean abs. log-ratio before training alone",
    "with the correction: what `audit` knows": "this and the correction: what `lit-qrl audit` knows",
    "fitted on study and pilot, judged on the grid": "the first ten, fitted on study and pilot, judged on the grid",
    "each position of the dial by a model without it": "the first ten, each position of the dial by a model without it",
}
LONG = {
    "s1+none+bf16": "bf16 sampler",
    "s1+sequence_tis+bf16": "bf16 sampler, sequence TIS",
    "s4+none+int4": "no correction",
    "s4+tis+int4": "TIS",
    "s4+sequence_tis+int4": "sequence TIS",
    "s4+sequence_mis+int4": "sequence MIS",
    "s4+ais+int4": "AIS",
    "s4+gspo+int4": "GSPO",
    "s4+tbpo+int4": "TBPO",
    "s4+aqn+int4": "AQN, no correction",
    "s4+none+int4_aligned": "`QATAligned`",
    "s1+none+nvfp4": "`nvfp4`, the policy as it is made",
    "s1+none+fp8_cache": "an FP8 KV cache, likewise",
}


def signed(values: Sequence[float], sign: str = "+") -> str:
    """Return a mean with its standard error, where there are several values.

    >>> signed([-0.1, -0.3]), signed([0.25], ""), signed([])
    ('−0.200 ± 0.10', '0.250', '–')
    """
    if not values:
        return "–"
    mean = f"{fmean(values):{sign}.3f}"
    return minus(mean + (f" ± {error(standard_error(values))}" if len(values) > 1 else ""))


def error(value: float) -> str:
    """Return a standard error with two or three digits.

    >>> error(0.0567), error(0.123)
    ('0.057', '0.12')
    """
    return f"{value:.2f}" if value >= 0.0995 else f"{value:.3f}"


def power(differences: Sequence[float]) -> str:
    """Return what so many differences would have shown four times out of five.

    >>> power([0.0, 0.1, 0.2]), power([0.0, 1.0]), power([0.1])
    ('0.31', '> 1', '–')
    """
    if len(differences) < 2:
        return "–"
    found = detectable(differences)
    return f"{found:.2f}" if found < 0.995 else "> 1"


def start(value: float) -> str:
    """Return a mean log-ratio with two digits.

    >>> start(0.1), start(0.00581), start(1e-7)
    ('0.10', '0.0058', '0')
    """
    return f"{value:#.2g}" if value > 1e-5 else "0"


def minus(text: str) -> str:
    """Return text with the sign of a negative number as a minus."""
    return text.replace("-", "−")


def lines(head: Cells, rows: Iterable[Cells]) -> str:
    """Return a Markdown table."""
    return "".join("| " + " | ".join(row) + " |\n" for row in (head, ["---"] * len(head), *rows))


# ----------------------------------------------------------------------------------------------------------- the study


def pilot(folder: Path) -> str:
    """Return the pilot's table: the learner's ends by learning rate and setting."""
    with (folder / "pilot.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    columns = ("s8+none+int4", "s10+none+int4", "s12+none+int4", "s4+none+int3")
    head = ("learning rate", "bf16 sampler", "`int4_group`, dial at 8", "at 10", "at 12", "INT3, dial at 4")

    def values(arm: str, name: str, rate: str | None = None) -> list[float]:
        return [float(row[name]) for row in found if row["arm"].endswith(arm) and rate in (None, row["rate"])]

    def span(ends: Sequence[float]) -> str:
        return "–".join(f"{end:.2g}" for end in (min(ends), max(ends)))

    rows = [["mean abs. log-ratio at the start", *(span(values(arm, "log_ratio_first")) for arm in ("bf16", *columns))]]
    for rate in sorted({row["rate"] for row in found}, key=float):
        ends = values("bf16", "learner_accuracy", rate)
        cells = [f"{fmean(ends):.2f} ({min(ends):.2f}–{max(ends):.2f})"]
        cells += [", ".join(f"{end:.2f}" for end in values(arm, "learner_accuracy", rate)) for arm in columns]
        rows.append([f"{float(rate) * 1e4:g} · 10⁻⁴", *cells])
    return lines(head, rows)


def first_setting(folder: Path) -> str:
    """Return the table of the study's first setting."""
    results = summary.read(folder)
    tests = {(one.arm, summary.short(one.against)): one for one in summary.compare(results)}
    head = ("arm", "learner", "sampler", "to bf16", "p", "detectable", "over no correction", "p", "collapsed")
    rows = []
    for arm in results.arms("s10"):
        if "fp8" in arm:
            continue
        runs = list(results.of(arm).values())
        cells = [
            {"aligned": "`QATAligned`", "ais": "AIS, δ = 0.02"}.get(
                summary.short(arm), summary.NAMES.get(summary.short(arm), summary.short(arm))
            ),
            signed([one.learner_accuracy for one in runs], ""),
            signed([one.sampler_accuracy for one in runs], ""),
        ]
        for against in ("bf16 sampler", "none"):
            test = tests.get((arm, against))
            cells += paired_cells(test) if test else ["–", "–"] + ["–"] * (against != "none")
            if test and against != "none":
                cells.append(f"{test.detectable:.2f}")
        rows.append([*cells, "–" if "bf16" in arm else summary.collapsed(results, arm, "s10+none+bf16")])
    return lines(head, rows)


def paired_cells(test: summary.Comparison) -> list[str]:
    """Return a paired difference with its standard error, and Holm's p."""
    gap = minus(f"{test.difference:+.3f} ± {error(test.standard_error)}")
    return [gap, summary.probability(test.p_holm)]


def habits(folder: Path) -> str:
    """Return the table of the study's habits."""
    results = summary.read(folder)
    tests = {one.arm: one for one in summary.compare(results) if summary.short(one.against) == "bf16 sampler"}
    head = ("habit", "seeds", "bf16 sampler's learner", "no correction: learner", "to bf16", "p", "detectable")
    rows = []
    for level, name in HABITS.items():
        prefix = level if level == "s10" else f"{level}+s10"
        plain, none = results.of(f"{prefix}+none+bf16"), results.of(f"{prefix}+none+int4")
        test = tests[f"{prefix}+none+int4"]
        sampled = [none[seed].sampler_accuracy - plain[seed].sampler_accuracy for seed in none if seed in plain]
        rows.append(
            [
                name,
                str(test.seeds),
                signed([one.learner_accuracy for one in plain.values()], ""),
                signed([one.learner_accuracy for one in none.values()], ""),
                *paired_cells(test),
                f"{test.detectable:.2f}",
                signed(sampled),
                summary.collapsed(results, f"{prefix}+none+int4", f"{prefix}+none+bf16"),
            ]
        )
    return lines((*head, "sampler, to bf16", "collapsed"), rows)


# ------------------------------------------------------------------------------------------------------------ the grid

Runs = Mapping[str, Mapping[int, grid_table.Row]]


def grid_runs(folder: Path) -> dict[str, dict[int, grid_table.Row]]:
    """Return the grid's runs by arm and seed."""
    found: dict[str, dict[int, grid_table.Row]] = {}
    for row in grid_table.read(folder / "grid" / grid_table.RUNS_FILE):
        if row["study"] == "grid":
            found.setdefault(str(row["arm"]), {})[int(str(row["seed"]))] = row
    return found


def gaps(runs: Runs, arm: str) -> tuple[list[float], list[float]]:
    """Return an arm's differences to its bf16 sampler's runs, of learners and of samplers."""
    learner, sampler = [], []
    control = runs.get(grid_table.control_of(arm), {})
    for seed, row in sorted(runs.get(arm, {}).items()):
        if seed in control:
            gap = grid_table.difference(row, control[seed])
            learner += [] if gap is None else [gap]
            if row["iterations"] == control[seed]["iterations"]:
                sampler.append(float(str(row["sampler"])) - float(str(control[seed]["sampler"])))
    return learner, sampler


def study_gaps(folder: Path, arm: str) -> tuple[list[float], list[float]]:
    """Return the same of an arm of the study at the grid's length, from its curves."""
    points: dict[tuple[str, int], dict[int, summary.Point]] = {}
    for one in summary.read(folder).points:
        points.setdefault((one.arm, one.seed), {})[one.iteration] = one
    learner, sampler = [], []
    for (name, seed), ours in points.items():
        theirs = points.get((f"s{STUDY_LEVEL}+none+bf16", seed))
        if name == arm and theirs:
            evaluated = range(STUDY_UNTIL - 10 * (grid_table.LAST_EVALUATIONS - 1), STUDY_UNTIL + 1, 10)
            drawn = range(STUDY_UNTIL - grid_table.LAST_ITERATIONS + 10, STUDY_UNTIL + 1, 10)
            for gathered, name_, at in (
                (learner, "learner_accuracy", evaluated),
                (sampler, "sampler_accuracy", drawn),
            ):
                gathered.append(fmean(getattr(ours[i], name_) - getattr(theirs[i], name_) for i in at))
    return learner, sampler


def levels(folder: Path) -> str:
    """Return the table of the dial's levels."""
    runs = grid_runs(folder)
    replayed = [row for row in grid_table.read(folder / "grid" / grid_table.RUNS_FILE) if row["study"] == "runs"]
    head = ("dial", "begins at", "seeds", "policy", *CORRECTIONS.values(), "`QATAligned`")
    rows = []
    for level in LEVELS:
        arms = [f"s{level}+{correction}+int4" for correction in CORRECTIONS] + [f"s{level}+none+int4_aligned"]
        study = level == STUDY_LEVEL
        found = [study_gaps(folder, arm) if study else gaps(runs, arm) for arm in arms]
        begun = replayed if study else list(runs[arms[0]].values())
        begins = fmean(float(str(row["log_ratio_1"])) for row in begun if row["arm"] == arms[0])
        seeds, aligned = len(found[0][0]), len(found[-1][0])
        count = str(seeds) if aligned in (0, seeds) else f"{seeds} ({aligned})"
        name = f"{level} (the study)" if study else str(level)
        rows.append([name, start(begins), count, "learner", *(signed(learner) for learner, _ in found)])
        rows.append(["", "", "", "sampler", *(signed(sampler) for _, sampler in found)])
    return lines(head, rows)


def blocks(folder: Path) -> str:
    """Return the table of the grid's other arms, those that were run."""
    runs = grid_runs(folder)
    rows = []
    for arm, name in NAMES.items():
        learner, sampler = gaps(runs, arm)
        if learner:
            begins = start(fmean(float(str(row["log_ratio_1"])) for row in runs[arm].values()))
            rows.append([name, str(len(learner)), begins, signed(learner), power(learner), signed(sampler)])
    return lines(("what", "seeds", "begins at", "learner", "detectable", "sampler"), rows)


def odds(folder: Path) -> str:
    """Return the table of what foretells a loss, which `odds.py` has written."""
    written = (folder / "grid" / "odds.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in written if line.startswith("|")][2:]
    for row in rows:
        row[0] = FORETOLD[row[0]]
    rows[0][3] = f"**{rows[0][3]}**"
    return lines(("foretold by", "runs judged", "that lost", "AUROC", "95 % interval"), rows)


# ------------------------------------------------------------------------------------------------------ long reasoning


def probed(folder: Path) -> str:
    """Return the table of the policy whose weights are rounded."""
    found = json.loads((folder / "long" / long_reasoning.PROBE_FILE).read_text())
    head = ("dial", "bf16: solved", "`nvfp4`: solved", "mean abs. log-ratio", "`int4_group`: solved")
    rows = []
    for name, one in found.items():
        cells = [f"{one['bf16_solved']:.3f}"]
        for format in ("nvfp4", "int4_group"):
            cells += [f"{one[f'{format}_solved']:.3f}", f"{one[f'{format}_log_ratio']:.4f}"]
        rows.append(["1, the policy as it is made" if name == "s1" else name[1:], *cells])
    return lines((*head, "mean abs. log-ratio"), rows)


def long_arms(folder: Path) -> str:
    """Return the table of the long-reasoning study's arms."""
    rows = long_reasoning.compared(long_reasoning.read(folder / "long" / long_reasoning.CURVES_FILE))
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in long_reasoning.table(rows)]
    found: dict[str, dict[int, dict[int, long_reasoning.Row]]] = {}
    for one in rows:
        points = found.setdefault(str(one["arm"]), {}).setdefault(int(str(one["seed"])), {})
        points[int(str(one["iteration"]))] = one
    found = {arm: {seed: points for seed, points in seeds.items() if max(points) > 0} for arm, seeds in found.items()}
    by_arm = {line[0]: line for line in table[2:]}
    control, without = found[long_reasoning.CONTROL], found["s4+none+int4"]
    result = []
    for arm, name in LONG.items():
        if not found.get(arm):
            continue
        ends = {
            metric: [long_reasoning.ending(points, sorted(points), metric) or 0.0 for points in found[arm].values()]
            for metric in ("learner", "sampler")
        }
        line, own = by_arm[arm], arm == long_reasoning.CONTROL
        to_bf16 = [] if own else long_reasoning.paired(found[arm], control, "learner")
        sampler = [] if own else long_reasoning.paired(found[arm], control, "sampler")
        plain = arm.endswith("+int4") and arm != "s4+none+int4"
        over = long_reasoning.paired(found[arm], without, "learner") if plain else []
        result.append(
            [
                name,
                line[1],
                signed(ends["learner"], ""),
                signed(to_bf16),
                line[11],
                power(to_bf16) + (", *no power*" if powerless(to_bf16) else ""),
                f"({signed(ends['sampler'], '')})" if own else signed(sampler),
                signed(over),
                line[13],
            ]
        )
    head = ("arm", "seeds", "learner", "to bf16", "p", "detectable", "sampler, to bf16", "learner, over no correction")
    return lines((*head, "p"), result)


def powerless(differences: Sequence[float]) -> bool:
    """Return whether a loss would not have been seen in so many differences."""
    return len(differences) > 1 and detectable(differences) > grid_table.LOSS


# ------------------------------------------------------------------------------------------------------------ the page

TABLES: dict[str, Callable[[Path], str]] = {
    "the pilot": pilot,
    "the first setting": first_setting,
    "the habits": habits,
    "the levels": levels,
    "the blocks": blocks,
    "what foretells": odds,
    "the probe": probed,
    "the long arms": long_arms,
}


def written(page: str, folder: Path) -> str:
    """Return a page with its tables as the CSVs of a folder give them.

    Raises:
        ValueError: a table has no place in the page.
    """
    for name, table in TABLES.items():
        begin = BEGIN.format(name)
        if begin not in page:
            raise ValueError(f"The page has no place for {name}. Expected: {begin.strip()} … {END.strip()}.")
        before, _, rest = page.partition(begin)
        page = before + begin + table(folder) + END + rest.partition(END)[2]
    return page


def unsupported(page: str) -> list[str]:
    """Return the figures of the page's first table, the decisions, that do not stand in the section that they link to.

    Figures of three decimals are looked for; ranges and rounded ones are not.
    """
    sections: dict[str, str] = {}
    for title, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", page, flags=re.MULTILINE | re.DOTALL):
        sections[re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")] = text
    missing = []
    table = page.partition("**What to switch on when.**")[2].partition("\n## ")[0]
    for told, anchor in re.findall(r"\[([^\]]*)\]\(#([\w-]+)\)", table):
        figures = (figure for figure in re.findall(r"[−+]\d\.\d{3}", told) if figure not in sections.get(anchor, ""))
        missing += [f"{figure} of “{told}” is not in #{anchor}" for figure in figures]
    return missing


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=SHIPPED, help="of the CSVs")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(arguments)
    page = options.page.read_text()
    new = written(page, options.folder)
    if not options.check:
        options.page.write_text(new)
    missing = unsupported(new)
    print(*missing, sep="\n")
    if new != page:
        print(f"The tables of {options.page} " + ("are not what the CSVs give." if options.check else "are new."))
    return 1 if missing or (options.check and new != page) else 0


if __name__ == "__main__":
    raise SystemExit(main())
