"""docs/architecture.md names what is there: every room, every file, every function and class."""

import re
from pathlib import Path

from tests.test_imports import FILES, FLOORS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGES = {f"{path.parent.relative_to(ROOT / 'lit_qrl')}/" for path in FILES if path.name == "__init__.py"} - {"./"}


def section(title):
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def test_the_table_of_rooms_is_the_order_of_imports():
    rows = re.findall(r"^\| (`.*?) \|", section("Rooms"), re.MULTILINE)
    found = [tuple(name.removesuffix(".py").rstrip("/") for name in re.findall(r"`(.*?)`", row)) for row in rows]
    outer = [tuple(name for name in row if "/" not in name) for row in found]
    assert outer == list(FLOORS)


def test_every_folder_is_named_and_every_folder_that_is_named_exists():
    rooms = set(re.findall(r"`([\w/]+/)`", section("Rooms"))) - {"tests/"}
    assert {room for room in rooms if not (ROOT / "lit_qrl" / room).is_dir()} == set()
    missing = PACKAGES - rooms
    assert missing == {"data/tasks/"} - rooms, missing


def test_the_picture_is_of_the_code_as_it_is():
    from PIL import Image

    from docs.draw_architecture import drawn

    with Image.open(ROOT / "docs" / "figures" / "architecture.png") as picture:
        assert picture.info["Source"] == drawn(), "python docs/draw_architecture.py draws it anew"


def test_files_that_are_named_exist():
    named = set(re.findall(r"`((?:[\w]+/)*\w+\.py)`", PAGE))
    roots = [
        ROOT,
        ROOT / "lit_qrl",
        ROOT / "lit_qrl" / "rollout" / "vllm",
        ROOT / "packages" / "vllm_fast" / "lit_qrl_vllm_fast",
    ]
    assert {name for name in named if not any((root / name).is_file() for root in roots)} == set()


def test_names_in_the_page_occur_in_the_code():
    code = [*FILES, *(ROOT / "packages").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *ROOT.glob("*/*.py")]
    known = {word for path in code for word in re.findall(r"\w+", path.read_text())}
    known |= {part for path in [*code, *(ROOT / "configs").rglob("*.yaml")] for part in re.findall(r"\w+", str(path))}
    named = {name for word in re.findall(r"`([A-Za-z_][\w.]*)`", PAGE) for name in word.split(".") if name}
    assert len(named) > 300
    assert named - known == set()
