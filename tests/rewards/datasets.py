"""Reads the rows of benchmarks that lie in `tests/files`."""

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "files"


def rows(name: str) -> list[dict[str, Any]]:
    with (DATA / f"{name}.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]
