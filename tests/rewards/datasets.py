"""Reads the benchmark files that lie beside the checkout."""

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[3] / "shared" / "data"


def rows(name: str) -> list[dict[str, Any]]:
    path = DATA / name
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing. These tests measure the rewards on the benchmark files of the folder shared/data; "
            "put it beside the checkout."
        )
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]
