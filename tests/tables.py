"""What a run or a study writes as CSV."""

import csv
from pathlib import Path


def csv_rows(path):
    """Return the rows of a file, each by the names of its columns."""
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))
