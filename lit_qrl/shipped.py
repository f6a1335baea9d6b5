"""Where the configurations, small policies and pages that ship lie: in the package, or above it in a checkout."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
SHIPPED = next(folder for folder in (_PACKAGE / "_data", _PACKAGE.parent) if folder.is_dir())
"""The folder that holds `configs/`, `models/` and `docs/`."""


def shipped(name: str) -> str:
    """Return a path, or the file or folder that ships under it where the working directory has none."""
    return str(SHIPPED / name) if not Path(name).expanduser().exists() and (SHIPPED / name).exists() else name
