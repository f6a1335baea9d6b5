"""Seconds between `lit-qrl fit` and the end of its first optimizer step, by part, each time in a fresh process.

    python benchmarks/start.py --repeat 5 --config configs/quickstart.yaml

Every part is the wall time and the processor's, least of all repeats: other work on a host only adds.
"""

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

marks: dict[str, tuple[float, float]] = {}


def mark(name: str) -> None:
    """Keep the time at which a part ended for the first time."""
    marks.setdefault(name, (time.perf_counter(), time.process_time()))


def ends(name: str, owner: type, method: str) -> None:
    """Let a part end with a method."""
    original: Callable[..., Any] = getattr(owner, method)

    @functools.wraps(original)
    def marked(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        mark(name)
        return found

    setattr(owner, method, marked)


def run(arguments: list[str], file: Path) -> None:
    """Run `fit` for one iteration, and write the seconds of its parts."""
    from lit_qrl.cli import main

    mark("python")
    with main.uncollected():
        import torch  # noqa: F401

        mark("import torch")
        import lightning.pytorch  # noqa: F401

        mark("import lightning, transformers")
        from lit_qrl.cli.training import QRLCLI
        from lit_qrl.data.module import RolloutDataModule
        from lit_qrl.module import GRPOModule
    mark("import the rest")
    ends("parser and configuration", QRLCLI, "before_instantiate_classes")
    ends("problems", RolloutDataModule, "setup")
    ends("weights, engine, first evaluation", GRPOModule, "on_train_start")
    ends("rollout and first step", GRPOModule, "optimizer_step")
    main.main(["fit", *arguments, "--trainer.max_epochs", "1"])
    times = [(0.0, 0.0), *marks.values()]  # the processor's begins with the process, the other with the interpreter
    times[0] = (times[1][0], 0.0)
    parts = {name: (b[0] - a[0], b[1] - a[1]) for name, a, b in zip(marks, times[:-1], times[1:], strict=True)}
    file.write_text(json.dumps(parts))


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    own, arguments = parser.parse_known_args()
    if own.run:
        run(arguments, own.run)
        return
    found: list[dict[str, list[float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "parts.json"
        for _ in range(own.repeat):
            command = [sys.executable, __file__, "--run", str(file), *arguments]
            subprocess.run(
                [*command, "--trainer.default_root_dir", folder], check=True, stdout=subprocess.DEVNULL, timeout=3600
            )
            found.append(json.loads(file.read_text()))
    print("| part | wall | processor |\n| --- | --- | --- |")
    for name in found[0]:
        wall, processor = (min(one[name][kind] for one in found) for kind in (0, 1))
        print(f"| {name} | {wall:.2f} | {processor:.2f} |")


if __name__ == "__main__":
    main()
