"""Attacks and faults, each tried from outside: what a stranger's file, an answer or a bad day does to a command.

    python benchmarks/redteam.py                    all rows, some minutes
    python benchmarks/redteam.py --only SIGTERM exit those whose name has one of the words

Every row runs `lit-qrl` as a user would, on a policy of a million parameters in a temporary folder, or the tests of the
project that show what no command can. One line for each says `held` or `broken`, and why; the exit status is 1 where
one is broken. What each attacker may do by right is in docs/security.md.
"""

import argparse
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARK = "code-was-run"
"""The file that an attack's code would make."""
PAYLOAD = """
import os, pickle
class Payload:
    def __reduce__(self):
        return (os.mkdir, ({mark!r},))
"""
REWARDS = """
import itertools, os, re, sys, threading, time
calls = itertools.count(1)

def plain(completions, **columns):
    return [len(text) % 3 / 3 for text in completions]

def leaves(completions, **columns):
    if next(calls) > 1:
        sys.exit(0)
    return plain(completions)

def forks(completions, **columns):
    if next(calls) == 2:
        os.fork()
    return plain(completions)

def moves(completions, **columns):
    os.chdir("/")
    return plain(completions)

def huge(completions, **columns):
    return [1e308] * len(completions)

def holds_on(completions, **columns):
    while next(calls) > 1:
        open("in-it", "w").close()
        try:
            while True:
                pass
        except BaseException:
            pass
    return plain(completions)

def holds_the_interpreter(completions, **columns):
    if next(calls) > 1:
        open("in-it", "w").close()
        re.match(r"(a+)+$", "a" * 60 + "b")
    return plain(completions)
"""


@dataclass
class Ended:
    """How a command ended."""

    status: int
    said: str
    seconds: float
    gib: float

    def wrong(self, status: int | Sequence[int], *words: str, never: Sequence[str] = ("Traceback",)) -> str:
        """Return what is other than wanted, or nothing: the status, a pattern that is not said, one that is."""
        wanted = [status] if isinstance(status, int) else list(status)
        text = " ".join(self.said.split())
        found = [] if self.status in wanted else [f"status {self.status} instead of {' or '.join(map(str, wanted))}"]
        found += [f"does not say {word!r}" for word in words if not re.search(word, text)]
        found += [f"says {word!r}" for word in never if word in text]
        return "; ".join(found) + (f" [{text[-300:]}]" if found else "")


@dataclass
class Place:
    """The folder of one row."""

    folder: Path
    trained: "Callable[[], Path]" = field(repr=False)
    """Returns the folder of a run of two iterations, made once; not to be changed."""

    def run(
        self,
        *words: str,
        seconds: float = 300,
        before: Callable[[], object] | None = None,
        send: int = 0,
        when: str = "",
    ) -> Ended:
        """Return how a command ended.

        Args:
            words: of the command, without Python.
            seconds: after which it is killed.
            before: called in its process before it begins.
            send: a signal, sent when `when` is there: a file of the folder, or a text that the command has said.
            when: see `send`.
        """
        paths = [str(ROOT), str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
        out, began = self.folder / "said.txt", time.monotonic()
        with out.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, *words], cwd=self.folder, env=environment, stdout=file, stderr=file, preexec_fn=before
            )
        usage = None
        while usage is None:
            pid, status, found = os.wait4(process.pid, os.WNOHANG)
            if pid:
                usage, process.returncode = found, os.waitstatus_to_exitcode(status)
            elif time.monotonic() - began > seconds:
                process.kill()
                send = 0
            elif send and ((self.folder / when).exists() or when in out.read_text(errors="replace")):
                process.send_signal(send)
                began, send = time.monotonic(), 0
            if usage is None:
                time.sleep(0.1)
        status = process.returncode if process.returncode >= 0 else 128 - process.returncode
        return Ended(status, out.read_text(errors="replace"), time.monotonic() - began, usage.ru_maxrss / 2**20)

    def fit(self, *options: str, reward: str = "attacks.plain", command: str = "fit", **more: object) -> Ended:
        """Return how a small training ended, by a reward of `REWARDS`."""
        (self.folder / "attacks.py").write_text(REWARDS)
        rows = self.folder / "rows.jsonl"
        if not rows.exists():
            rows.write_text(
                "".join(json.dumps({"question": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(16))
            )
        return self.run(*LIT_QRL, command, *SMALL, "--data.task.rewards", rewarded(reward), *options, **more)  # pyright: ignore[reportArgumentType]

    def copy(self) -> Path:
        """Return a copy of the trained run in this folder."""
        return Path(shutil.copytree(self.trained(), self.folder / "run", dirs_exist_ok=True))

    def tests(self, *nodes: str) -> str:
        """Return what tests of the project say that are not passed."""
        words = ["-m", "pytest", "-q", "-n", "0", "-m", "", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
        ended = self.run(*words, *(str(ROOT / node) for node in nodes), seconds=900)
        return ended.wrong(0, never=("no tests ran",))


LIT_QRL = ("-m", "lit_qrl.cli")
SMALL = (
    *("--config", "configs/quickstart.yaml", "--data.task", "DatasetTask", "--data.task.path", "rows.jsonl"),
    *("--data.task.chat", "false", "--data.task.evaluation_size", "4", "--data.prompts_per_iteration", "4"),
    *("--data.group_size", "4", "--trainer.limit_val_batches", "0", "--trainer.max_epochs", "3"),
    *(
        "--trainer.default_root_dir",
        "run",
        "--checkpoint.every_n_iterations",
        "1",
        "--report.samples_per_iteration",
        "4",
    ),
)


def rewarded(path: str, **arguments: object) -> str:
    """Return `data.task.rewards` with one reward."""
    return json.dumps([{"class_path": path, **({"init_args": arguments} if arguments else {})}])


@dataclass(frozen=True)
class Row:
    """One attack or fault; `tried` returns what went wrong, or nothing."""

    name: str
    wanted: str
    tried: Callable[[Place], str]


ROWS: list[Row] = []


def row(name: str, wanted: str) -> Callable[[Callable[[Place], str]], Callable[[Place], str]]:
    """Return a decorator that adds a function as a row."""

    def add(tried: Callable[[Place], str]) -> Callable[[Place], str]:
        ROWS.append(Row(name, wanted, tried))
        return tried

    return add


def ran(place: Place) -> str:
    """Return whether an attack's code was run."""
    return "code of the file was run" if (place.folder / MARK).exists() else ""


# ------------------------------------------------------------------------------------------------ files of strangers


def poisoned(place: Place, kind: str) -> Path:
    """Return a run whose last checkpoint names a folder with a pickle, or is one."""
    run = place.copy()
    last, elsewhere = run / "checkpoints" / "last.ckpt", place.folder / "elsewhere"
    code = PAYLOAD.format(mark=str(place.folder / MARK)) + (
        "import sys, torch\nlast, elsewhere, kind = sys.argv[1:]\n"
        "if kind == 'pickle':\n"
        "    torch.save({'state_dict': {}, 'x': Payload()}, last)\n"
        "else:\n"
        "    os.makedirs(elsewhere)\n"
        "    pickle.dump(Payload(), open(elsewhere + '/.metadata', 'wb'))\n"
        "    held = torch.load(last, weights_only=True)\n"
        "    held['parts'] = elsewhere if kind == 'absolute' else os.path.basename(elsewhere)\n"
        "    torch.save(held, last)\n"
    )
    beside = last.parent / "parts-1"
    made = place.run("-c", code, str(last), str(beside if kind == "beside" else elsewhere), kind)
    assert made.status == 0, made.said
    return run


@row("checkpoint names a folder elsewhere that holds a pickle", "refused by one sentence, nothing is run")
def _(place: Place) -> str:
    run = poisoned(place, "absolute")
    last = str(run / "checkpoints" / "last.ckpt")
    exported = place.run(*LIT_QRL, "export", str(run), "--output", "exported")
    went_on = place.fit("--ckpt_path", last)
    evaluated = place.fit("--ckpt_path", last, command="validate")
    return ran(place) or exported.wrong(2) or went_on.wrong(2) or evaluated.wrong(2)


@row("folder of a checkpoint's parts holds a pickle that runs code", "refused by one sentence, nothing is run")
def _(place: Place) -> str:
    run = poisoned(place, "beside")
    ended = place.run(*LIT_QRL, "export", str(run), "--output", "exported")
    return ran(place) or ended.wrong(2)


@row("checkpoint is a pickle that runs code, also read from Python", "refused, nothing is run")
def _(place: Place) -> str:
    last = str(poisoned(place, "pickle") / "checkpoints" / "last.ckpt")
    code = "import sys\nfrom lit_qrl.strategies import ShardedStrategy\nShardedStrategy().load_checkpoint(sys.argv[1])"
    read = place.run("-c", code, last)
    ended = place.fit("--ckpt_path", last)
    return ran(place) or ("" if read.status else "it was read") or ended.wrong(2)


@row("last checkpoint is cut off", "status 2, one paragraph, no advice to load what is not weights")
def _(place: Place) -> str:
    last = place.copy() / "checkpoints" / "last.ckpt"
    os.truncate(last, last.stat().st_size // 2)
    return place.fit("--ckpt_path", "last").wrong(2, never=("Traceback", "weights_only=False"))


@row("last checkpoint is cut off and --resume_if_possible true is given", "the newest whole one is taken")
def _(place: Place) -> str:
    last = place.copy() / "checkpoints" / "last.ckpt"
    shutil.copy(last, last.with_name("iteration-2.ckpt"))
    os.truncate(last, last.stat().st_size // 2)
    return place.fit("--resume_if_possible", "true").wrong(0, "iteration-2")


@row("row of 100 MB in the data", "dropped before it is made tokens: under 4 GiB")
def _(place: Place) -> str:
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(16)]
    rows.append({"question": "1+" * (50 * 2**20), "answer": "1"})
    (place.folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    ended = place.fit("--trainer.max_epochs", "1", "--data.long_prompt", "drop")
    return ended.wrong(0) or ("" if ended.gib < 4 else f"{ended.gib:.1f} GiB")


@row("row of the data is nested 100,000 deep", "status 2, one sentence")
def _(place: Place) -> str:
    (place.folder / "rows.jsonl").write_text('{"question": ' + "[" * 100_000 + "]" * 100_000 + ', "answer": "1"}\n')
    return place.fit().wrong(2)


@row("event log and samples are nested 100,000 deep when a report is made", "the report is made")
def _(place: Place) -> str:
    run = place.copy()
    for name in ("events.jsonl", "samples.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"kind": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    return place.run(*LIT_QRL, "report", str(run)).wrong(0)


@row("model's weights are a pickle that runs code", "status 2, nothing is run")
def _(place: Place) -> str:
    model = Path(shutil.copytree(ROOT / "models" / "tiny-countdown-products", place.folder / "model"))
    for file in model.glob("*.safetensors"):
        file.unlink()
    code = PAYLOAD.format(mark=str(place.folder / MARK)) + (
        "import sys, torch\ntorch.save({'x': Payload()}, sys.argv[1])\n"
    )
    place.run("-c", code, str(model / "pytorch_model.bin"))
    ended = place.fit("--model.policy.model", str(model))
    return ran(place) or ended.wrong(2)


@row("texts of a run are HTML and scripts when its report is made", "escaped")
def _(place: Place) -> str:
    run = place.copy()
    with (run / "samples.jsonl").open("a") as file:
        said = "<script>alert(1)</script>"
        file.write(
            json.dumps({"iteration": 2, "prompt": said, "completion": said, "reward": 1.0, "answer": said}) + "\n"
        )
    ended = place.run(*LIT_QRL, "report", str(run))
    page = (run / "report" / "index.html").read_text()
    return ended.wrong(0) or ("the script is in the page" if "<script>alert" in page else "")


@row("configuration is called ...yaml", "the run is written under runs/")
def _(place: Place) -> str:
    (place.folder / "...yaml").write_text((ROOT / "configs" / "quickstart.yaml").read_text())
    words = list(SMALL)
    at = words.index("--trainer.default_root_dir")
    del words[at : at + 2]
    words[1] = "...yaml"
    place.fit("--trainer.max_epochs", "1")  # for its files
    place.run(*LIT_QRL, "fit", *words, "--data.task.rewards", rewarded("attacks.plain"), "--trainer.max_epochs", "1")
    stray = [path for path in place.folder.parent.glob("*") if path.name.isdecimal()]
    outside = [
        path for path in place.folder.rglob("metrics.csv") if path.parts[len(place.folder.parts)] not in ("runs", "run")
    ]
    return f"it is at {[*stray, *outside][0]}" if stray or outside else ""


@row("file with the key of a server can be read by all", "refused or said")
def _(place: Place) -> str:
    key = place.folder / "token"
    key.write_text("0123456789abcdef\n")
    key.chmod(0o644)
    ended = place.run(*LIT_QRL, "serve", str(ROOT / "models" / "tiny-countdown"), "--token_file", str(key), "--show")
    return "" if re.search(r"readable|read by|chmod|permission", ended.said) else ended.wrong(-1)


@row("installed from its wheel in an empty folder: the quickstart", "it is there")
def _(place: Place) -> str:
    source, wheels, site = place.folder / "source", place.folder / "wheels", place.folder / "site"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    made = place.run("-m", "pip", "wheel", "--no-deps", "--quiet", "-w", str(wheels), str(source))
    if made.status:
        return made.wrong(0)
    shutil.unpack_archive(next(wheels.glob("*.whl")), site, "zip")
    empty = place.folder / "empty"
    empty.mkdir()
    code = (
        f"import os, sys\nsys.path[:] = [{str(site)!r}, *(one for one in sys.path if one not in ({str(ROOT)!r}, ''))]\n"
        f"os.chdir({str(empty)!r})\nimport lit_qrl\nassert lit_qrl.__file__.startswith({str(site)!r})\n"
        "from lit_qrl.cli.main import main\nmain()"
    )
    return place.run("-c", code, "quickstart", "--dry_run").wrong(0)


@row("libraries are installed by their hashes", "the Makefile does, where it is asked to")
def _(place: Place) -> str:
    return "" if "--require-hashes" in (ROOT / "Makefile").read_text() else "no target of the Makefile does"


@row("what comes over the network", "nothing of it is unpickled (the protocol that did so is gone)")
def _(place: Place) -> str:
    return place.tests("tests/rollout/vllm/test_server.py::test_nothing_that_comes_over_the_network_is_unpickled")


@row("strangers at a server's routes", "401 without the key")
def _(place: Place) -> str:
    return place.tests("tests/rollout/vllm/test_server.py::test_every_route_asks_for_the_key")


# ------------------------------------------------------------------------------------------------ answers and rewards


@row("answer is a power of 350 digits", "scored 0, no error")
def _(place: Place) -> str:
    code = (
        "from lit_qrl.rewards import MathReward, Sample\n"
        "if __name__ == '__main__':\n"
        "    print('scores', MathReward()([Sample('', r'\\boxed{2^3^' + '9' * 350 + '}', '7')]))\n"
    )
    (place.folder / "answer.py").write_text(code)
    return place.run("answer.py").wrong(0, r"scores \[0\.0\]")


@row("5,000 mutated answers to every reward", "no exception, none over 3 s")
def _(place: Place) -> str:
    return place.run(str(ROOT / "benchmarks" / "fuzz_rewards.py"), "--count", "5000", seconds=900).wrong(0)


@row("worker that judges answers is made to write, delete, connect, kill", "refused, nothing changed")
def _(place: Place) -> str:
    return place.tests("tests/rewards/test_workers.py::test_a_confined_worker_does_no_harm")


@row("reward with concurrency holds the interpreter; SIGTERM", "143 within 30 s")
def _(place: Place) -> str:
    given = {"concurrency": 4, "timeout": 600, "retries": 0}
    ended = place.fit(
        "--data.task.rewards", rewarded("attacks.holds_the_interpreter", **given), send=signal.SIGTERM, when="in-it"
    )
    return ended.wrong(143) or late(ended)


@row("reward with concurrency holds the interpreter beyond its timeout", "late and left out, no thread stays")
def _(place: Place) -> str:
    return place.tests(
        "tests/rewards/test_function.py::test_calls_that_hold_the_interpreter_end_alone",
        "tests/rewards/test_service.py::test_late_calls_leave_no_threads_behind",
    )


@row("environment's reply holds the interpreter", "its sequence ends by the limit, the others go on")
def _(place: Place) -> str:
    return place.tests("tests/data/test_environment.py::test_methods_run_in_processes_that_a_limit_ends")


@row("early reward is late", "ended, and blamed by its own name")
def _(place: Place) -> str:
    return place.tests(
        "tests/rewards/test_streaming.py::test_an_early_reward_that_is_late_is_ended",
        "tests/rewards/test_limit.py::test_what_hangs_is_interrupted_and_the_next_call_works",
    )


@row("reward's score is 1e308", "status 2, the reward is named")
def _(place: Place) -> str:
    return place.fit(reward="attacks.huge").wrong((2, 70), "huge")


@row("reward changes the working directory", "all files of the run lie in its folder")
def _(place: Place) -> str:
    ended = place.fit(reward="attacks.moves")
    names = ("metrics.csv", "events.jsonl", "samples.jsonl", "checkpoints/last.ckpt", "report/index.html")
    absent = [name for name in names if not (place.folder / "run" / name).is_file()]
    return ended.wrong(0) or (f"{', '.join(absent)} not in the run folder" if absent else "")


@row("reward forks, and the child returns", "one process goes on, three rows of metrics")
def _(place: Place) -> str:
    ended = place.fit(reward="attacks.forks")
    time.sleep(5)  # of a second trainer
    rows = len((place.folder / "run" / "metrics.csv").read_text().splitlines()) - 1
    return ended.wrong(0) or ("" if rows == 3 else f"{rows} rows of metrics")


# ----------------------------------------------------------------------------------------------- statuses and signals


@row("reward calls sys.exit(0)", "status 70, and where it was called")
def _(place: Place) -> str:
    return place.fit(reward="attacks.leaves").wrong(70, r"SystemExit\(0\) at \S*attacks\.py:\d+")


def late(ended: Ended) -> str:
    """Return what to say of a command that took too long to end after its signal."""
    return f"{ended.seconds:.0f} s after the signal" if ended.seconds > 30 else ""


@row("SIGTERM to a reward that loops and catches everything", "143 within 30 s, a report")
def _(place: Place) -> str:
    ended = place.fit(reward="attacks.holds_on", send=signal.SIGTERM, when="in-it")
    page, patience = place.folder / "run" / "report" / "index.html", time.monotonic() + 60
    while not page.is_file() and time.monotonic() < patience:  # a process of its own makes it
        time.sleep(0.5)
    report = "" if page.is_file() else "no report"
    return ended.wrong(143, "was not let through") or late(ended) or report


@row("SIGINT before the first iteration", "130 and a message")
def _(place: Place) -> str:
    return place.fit(send=signal.SIGINT, when="Started in").wrong(130, "(?i)interrupted by SIGINT")


@row("SIGTERM while libraries are imported", "143 and a message")
def _(place: Place) -> str:
    (place.folder / "sitecustomize.py").write_text(
        "import os, sys\n"
        "class Seen:\n"
        "    def find_spec(self, name, *more):\n"
        "        if name == 'lightning.pytorch':\n"
        "            open('imports', 'w').close()\n"
        "sys.meta_path.insert(0, Seen())\n"
    )
    return place.fit(send=signal.SIGTERM, when="imports").wrong(143, "interrupted by SIGTERM")


@row("SIGINT while the last report is made", "130, a message and the report")
def _(place: Place) -> str:
    ended = place.fit(send=signal.SIGINT, when="run/report")
    report = "" if (place.folder / "run" / "report" / "index.html").is_file() else "no report"
    return ended.wrong(130, "(?i)interrupted by SIGINT") or report


# --------------------------------------------------------------------------------------------------------------- disks


def filled(place: Place, mount: Path) -> str:
    """Return what is wrong with a run on a disk that is full from its second iteration on, and its continuation."""
    run, ballast = mount / "run", mount / "ballast"
    unbroken = place.folder / "unbroken"
    done = place.fit("--trainer.default_root_dir", str(unbroken), "--trainer.max_epochs", "6")
    if done.wrong(0):
        return done.wrong(0)
    size = sum(file.stat().st_size for file in (unbroken / "checkpoints").iterdir())
    free = shutil.disk_usage(mount).free
    with ballast.open("wb") as file:  # two checkpoints do not fit beside what a run writes at first
        file.write(b"\0" * max(free - int(1.5 * size) - 2**20, 0))
    options = ("--trainer.default_root_dir", str(run), "--trainer.max_epochs", "6")
    full = place.fit(*options)
    if wrong := full.wrong(
        70, r"/run/\S+ could not be written: No space left on device \(\S+ has", never=("Traceback", "Logging error")
    ):
        return wrong
    ballast.unlink()
    again = place.fit(*options, "--resume_if_possible", "true")
    return again.wrong(0) or differing(place, unbroken, run)


def differing(place: Place, one: Path, other: Path) -> str:
    """Return the weights and states in which the last checkpoints of two runs differ."""
    code = (
        f"import sys\nsys.path.insert(0, {str(ROOT / 'benchmarks')!r})\nfrom pathlib import Path\n"
        "from endurance import compare\nprint(compare(*map(Path, sys.argv[1:]))['differing'] or 'nothing')"
    )
    return place.run("-c", code, str(one), str(other)).wrong(0, "nothing")


@row(
    "disk is full while a run writes, and has space again", "70, one sentence names file and disk; resumed bit for bit"
)
def _(place: Place) -> str:
    mount = place.folder / "disk"
    mount.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(mount)]
    if os.geteuid() or subprocess.run(words, capture_output=True, check=False).returncode:
        return place.tests("tests/run/test_exits.py::test_a_full_disk_is_one_sentence_that_names_file_and_disk")
    try:
        return filled(place, mount)
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=False)


@row("file of a run may not grow beyond a limit (ulimit -f)", "70, one sentence names the file")
def _(place: Place) -> str:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))

    return place.fit(before=limit).wrong(70, r"last\.ckpt could not be written: File too large")


@row("two runs in one folder", "the second is refused by one sentence, status 2")
def _(place: Place) -> str:
    place.fit("--trainer.max_epochs", "1")
    code = (
        "import subprocess, sys, time\nfrom pathlib import Path\nfrom lit_qrl.run.folder import RunLock\n"
        "lock = RunLock(); lock.take(Path('run'))\n"
        "sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)"
    )
    words = (*LIT_QRL, "fit", *SMALL, "--data.task.rewards", rewarded("attacks.plain"), "--ckpt_path", "last")
    return place.run("-c", code, *words).wrong(2, "Another training runs in")


@row("what strangers may bring is written down", "docs/security.md in the navigation")
def _(place: Place) -> str:
    shown = "security.md" in (ROOT / "mkdocs.yml").read_text() and (ROOT / "docs" / "security.md").is_file()
    return "" if shown and (ROOT / "SECURITY.md").is_file() else "it is not"


# ----------------------------------------------------------------------------------------------------------------- all


def main() -> None:
    """Try the rows and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="words, of which a row's name has one")
    parser.add_argument("--keep", action="store_true", help="leave the folders of broken rows")
    args = parser.parse_args()
    chosen = [one for one in ROWS if not args.only or any(word in one.name for word in args.only)]
    base, broken = Path(tempfile.mkdtemp(prefix="redteam-")), 0

    def trained() -> Path:
        folder = base / "trained"
        if not (folder / "run").exists():
            folder.mkdir()
            ended = Place(folder, trained).fit("--trainer.max_epochs", "2")
            assert ended.status == 0, ended.said
        return folder / "run"

    print("| what | wanted | result |\n| --- | --- | --- |", flush=True)
    for number, one in enumerate(chosen):
        place, began = Place(base / f"row{number}", trained), time.monotonic()
        place.folder.mkdir()
        try:
            why = one.tried(place)
        except Exception as error:  # of the attempt itself
            why = f"{type(error).__name__}: {error}"
        broken += bool(why)
        said = f"**broken**: {' '.join(why.split())[:400]}" if why else "held"
        print(f"| {one.name} | {one.wanted} | {said} ({time.monotonic() - began:.0f} s) |", flush=True)
        if not (why and args.keep):
            shutil.rmtree(place.folder, ignore_errors=True)
    print(f"\n{len(chosen) - broken} of {len(chosen)} are held.", flush=True)
    if not (broken and args.keep):
        with suppress(OSError):
            shutil.rmtree(base)
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
