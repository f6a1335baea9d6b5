"""Runs a study: arms × seeds of `lit-qrl fit`, resumable and in parts, and makes its table and figure.

    python examples/study.py examples/mismatch_study --list
    python examples/study.py examples/mismatch_study --jobs 2
    python examples/study.py examples/mismatch_study --arms 'none+*,tis_2+int4_group' --seeds 0,1
    python examples/study.py examples/mismatch_study --report

A study is a folder with a `study.toml`:

    base = ["configs/quickstart.yaml"]           # configuration files of every run
    seeds = 5
    baseline = "none+bf16"                       # what the table compares with, seed by seed
    arms = ["none+bf16", "{none,tis_2}+{int4,fp8}"]   # parts joined by "+", in the order of their files
    [config]                                     # of every run, after the base
    [parts.tis_2]
    files = ["configs/correction/tis.yaml"]      # and `config`, written to a file of its own
    [variants.strong.config]                     # chosen by --variant, in a folder of its own
    learner = ["configs/precision/rollout_bf16.yaml"]   # after each run evaluate its weights so, not as sampled

Each run is a process with one thread, in `runs/<study>/<arm>/<seed>`. A finished run is left alone, one that was cut
goes on from its checkpoint, and one that was made with another configuration is refused. Arguments after `--` go to
every run.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from study_report import write_report

from lit_qrl.errors import nearest
from lit_qrl.report.run import Run

ROOT = Path(__file__).resolve().parents[1]
COMMAND_FILE, LOG_FILE = "command.json", "log.txt"
LOG_LINES = 12
"""Lines of a failed run's log that are shown."""


class StudyError(Exception):
    """What is wrong with the study or with what was asked of it, as one sentence."""


@dataclass(frozen=True)
class Part:
    """One piece of an arm: configuration files, then a configuration of its own, and a `learner` of its own."""

    files: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    learner: Sequence[str] | None = None


@dataclass(frozen=True)
class Study:
    """What `study.toml` says, with every arm spelled out.

    Args:
        name: of the folder of `study.toml`, with the variant's.
        base: configuration files of every run.
        common: configurations of every run, by name, after the base.
        parts: by name.
        arms: for every arm the names of its parts.
        seeds: how many seeds a whole study has.
        baseline: the arm that the others are compared with.
        groups: for each row of the figure patterns of its arms.
        panels: metrics that the figure draws; None draws the usual ones.
        learner: configuration files with which a finished run's weights are evaluated; none evaluates nothing.
        power: what must be seen for the study to have an answer: `arm`, `accuracy_loss`, `abs_log_ratio`.
    """

    name: str
    base: tuple[str, ...]
    common: dict[str, dict[str, Any]]
    parts: dict[str, Part]
    arms: dict[str, tuple[str, ...]]
    seeds: int
    baseline: str | None
    groups: dict[str, list[str]]
    panels: list[str] | None
    power: dict[str, Any]
    learner: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """One run: its arm and seed, its folder, the arguments of `lit-qrl`, and those of its evaluation afterwards."""

    arm: str
    seed: int
    folder: Path
    arguments: tuple[str, ...]
    fingerprint: str
    learner: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """`finished`, `cut` (has a checkpoint), `changed` (made with another configuration) or `new`."""
        recorded = _recorded(self.folder)
        if recorded is None:
            return "new"
        if recorded != self.fingerprint:
            return "changed"
        if Run(self.folder).status == "finished":
            return "finished"
        return "cut" if (self.folder / "checkpoints" / "last.ckpt").is_file() else "new"


def expand(pattern: str) -> list[str]:
    """Return the names that a pattern with alternatives in braces stands for.

    >>> expand("{none,ais}+{int4,fp8}")
    ['none+int4', 'none+fp8', 'ais+int4', 'ais+fp8']
    """
    pieces = re.split(r"\{([^{}]*)\}", pattern)
    choices = [piece.split(",") if index % 2 else [piece] for index, piece in enumerate(pieces)]
    return ["".join(chosen) for chosen in product(*choices)]


def load(folder: Path, variant: str | None = None) -> Study:
    """Return the study of a folder, or of its `study.toml`.

    Raises:
        StudyError: no such file, an unknown key, part, baseline or variant, or a configuration file that is missing.
    """
    path = folder / "study.toml" if folder.is_dir() else folder
    try:
        given = tomllib.loads(path.read_text())
    except OSError as error:
        raise StudyError(f"There is no study at {path} ({error.strerror}).") from error
    except tomllib.TOMLDecodeError as error:
        raise StudyError(f"{path} is not TOML: {error}.") from error
    known = ["base", "config", "parts", "arms", "seeds", "baseline", "variants", "groups", "panels", "power"]
    known += ["learner"]
    for key in given.keys() - set(known):
        raise StudyError(f"{path} has an unknown key {key!r}. {nearest(key, known)}")
    parts = {
        name: Part(tuple(one.get("files", ())), one.get("config", {}), one.get("learner"))
        for name, one in given["parts"].items()
    }
    arms = {}
    for name in (name for pattern in given["arms"] for name in expand(pattern)):
        arms[name] = tuple(name.split("+"))
        for part in arms[name]:
            if part not in parts:
                raise StudyError(f"The arm {name!r} has an unknown part {part!r}. {nearest(part, list(parts))}")
    common = {"common": given.get("config", {})}
    variants = given.get("variants", {})
    if variant is not None:
        if variant not in variants:
            raise StudyError(f"There is no variant {variant!r}. {nearest(variant, list(variants))}")
        common[f"variant-{variant}"] = variants[variant]["config"]
    baseline = given.get("baseline")
    power = given.get("power", {})
    for arm in filter(None, (baseline, power.get("arm"))):
        if arm not in arms:
            raise StudyError(f"{arm!r} is not an arm. {nearest(arm, list(arms))}")
    learner = tuple(given.get("learner", ()))
    for file in [*given["base"], *learner, *(file for part in parts.values() for file in part.files)]:
        if not (ROOT / file).is_file():
            raise StudyError(f"The configuration {file} does not exist.")
    return Study(
        name=path.parent.name + (f"-{variant}" if variant else ""),
        base=tuple(given["base"]),
        common=common,
        parts=parts,
        arms=arms,
        seeds=given.get("seeds", 5),
        baseline=baseline,
        groups={
            title: [one for pattern in patterns for one in expand(pattern)]
            for title, patterns in given.get("groups", {"": ["*"]}).items()
        },
        panels=given.get("panels"),
        power=power,
        learner=learner,
    )


def plan(
    study: Study, out: Path, arms: Sequence[str] = ("*",), seeds: Sequence[int] | None = None, extra: Sequence[str] = ()
) -> list[Job]:
    """Return the runs of a part of a study, seed by seed, and write the configurations that they read.

    Args:
        study: the whole.
        out: folder of the runs.
        arms: names or patterns.
        seeds: all of the study's by default.
        extra: arguments for every run.

    Raises:
        StudyError: a pattern without an arm.
    """
    chosen = []
    for pattern in arms:
        found = [name for name in study.arms if fnmatchcase(name, pattern)]
        if not found:
            raise StudyError(f"No arm is called {pattern!r}. {nearest(pattern, list(study.arms))}")
        chosen += [name for name in found if name not in chosen]
    own = {**study.common, **{name: part.config for name, part in study.parts.items()}}
    written = {name: _write(out / "configs" / f"{name}.yaml", config) for name, config in own.items() if config}
    jobs = []
    for seed in range(study.seeds) if seeds is None else seeds:
        for arm in chosen:
            files = [*study.base, *(written[name] for name in study.common if name in written)]
            for name in study.arms[arm]:
                files += [*study.parts[name].files, *([written[name]] if name in written else [])]
            settings = ["--seed_everything", str(seed), "--trainer.enable_progress_bar", "false", *extra]
            folder = out / arm / str(seed)
            mine = [*settings, "--trainer.default_root_dir", str(folder)]
            arguments = ["fit", *_configs(files), *mine, "--resume_if_possible", "true"]
            after = [one for name in study.arms[arm] if (one := study.parts[name].learner) is not None] or [
                study.learner
            ]
            learner = ["validate", *_configs([*files, *after[-1]]), *mine, "--ckpt_path", "last"]
            contents = [yaml.safe_load((ROOT / file).read_text()) for file in files]
            fingerprint = hashlib.sha256(json.dumps([contents, settings]).encode()).hexdigest()
            jobs.append(Job(arm, seed, folder, tuple(arguments), fingerprint, tuple(learner) if after[-1] else ()))
    return jobs


def _configs(files: Sequence[str | Path]) -> list[str]:
    return [word for file in files for word in ("--config", str(file))]


def run_all(jobs: Sequence[Job], parallel: int = 1) -> list[Job]:
    """Run what is not finished, `parallel` at a time; return the runs that failed.

    Raises:
        StudyError: a run's folder holds a run of another configuration.
    """
    states = [job.state for job in jobs]
    for job, state in zip(jobs, states, strict=True):
        if state == "changed":
            raise StudyError(
                f"{job.folder} holds a run of another configuration. Remove it, or choose another folder by --out."
            )
    waiting = [job for job, state in zip(jobs, states, strict=True) if state != "finished"]
    print(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are finished.", flush=True)
    failed = []
    with ThreadPoolExecutor(parallel) as pool:
        futures = {pool.submit(run_one, job): job for job in waiting}
        try:
            for count, future in enumerate(as_completed(futures), start=1):
                job, (code, seconds) = futures[future], future.result()
                accuracy = Run(job.folder).accuracy.last
                result = "" if accuracy is None else f", accuracy {accuracy:.3f}"
                verdict = f"{seconds:.0f} s{result}" if code == 0 else f"FAILED with status {code}"
                print(f"[{count}/{len(waiting)}] {job.arm} seed {job.seed}: {verdict}", flush=True)
                if code:
                    failed.append(job)
                    lines = (job.folder / LOG_FILE).read_text(errors="replace").splitlines()[-LOG_LINES:]
                    print("\n".join(f"    {line}" for line in lines), flush=True)
        except KeyboardInterrupt:
            # The interrupt has reached the runs too: they save and end by themselves.
            pool.shutdown(cancel_futures=True)
            raise
    return failed


def run_one(job: Job) -> tuple[int, float]:
    """Run one job to its end, its output in `log.txt`; return the exit status and the seconds."""
    job.folder.mkdir(parents=True, exist_ok=True)
    record(job)
    start = time.perf_counter()
    # One thread each: small models gain nothing from more, and results then do not depend on the number of cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with (job.folder / LOG_FILE).open("a") as log:
        for arguments in filter(None, (job.arguments, job.learner)):
            command = [sys.executable, "-m", "lit_qrl.cli.main", *arguments]
            code = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, check=False).returncode
            if code:
                break
    return code, time.perf_counter() - start


def record(job: Job) -> None:
    """Write what a run is made with into its folder, which `Job.state` compares."""
    told = {"fingerprint": job.fingerprint, "arguments": job.arguments}
    (job.folder / COMMAND_FILE).write_text(json.dumps(told, indent=1) + "\n")


def _recorded(folder: Path) -> str | None:
    try:
        return json.loads((folder / COMMAND_FILE).read_text())["fingerprint"]
    except (OSError, ValueError, KeyError):
        return None


def _write(path: Path, config: dict[str, Any]) -> Path:
    """Write a configuration where it changed, in one step, since runs may be reading it; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(config, sort_keys=False)
    if not path.is_file() or path.read_text() != text:
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(text)
        temporary.replace(path)
    return path


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="folder with a study.toml")
    parser.add_argument("--arms", default="*", help="names or patterns, separated by commas")
    parser.add_argument("--seeds", help="numbers, separated by commas; all of the study's by default")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--variant", help="a variant of the study, in a folder of its own")
    parser.add_argument("--out", type=Path, help="folder of the runs, by default runs/<study>")
    parser.add_argument("--list", action="store_true", help="show the runs and their states, run nothing")
    parser.add_argument("--report", action="store_true", help="make table.md and figure.png of what there is")
    args = list(sys.argv[1:] if args is None else args)
    args, extra = (args[: args.index("--")], args[args.index("--") + 1 :]) if "--" in args else (args, [])
    asked = parser.parse_args(args)
    try:
        study = load(asked.study, asked.variant)
        out = (asked.out or ROOT / "runs" / study.name).resolve()
        seeds = None if asked.seeds is None else [int(seed) for seed in asked.seeds.split(",")]
        jobs = plan(study, out, asked.arms.split(","), seeds, extra)
        if asked.list:
            for job in jobs:
                print(f"{job.state:<9} {job.arm} seed {job.seed}")
        elif asked.report:
            states = [job.state for job in jobs]
            finished = [job for job, state in zip(jobs, states, strict=True) if state == "finished"]
            results = [(job.arm, job.seed, Run(job.folder)) for job in finished]
            print(write_report(study, results, len(jobs), out, states.count("changed")))
        else:
            return 1 if run_all(jobs, asked.jobs) else 0
    except StudyError as error:
        print(f"study: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("study: interrupted; the same command goes on from here.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
