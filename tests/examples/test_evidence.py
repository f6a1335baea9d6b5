import re
import shutil
from types import SimpleNamespace

import pytest

from tests.examples.scripts import EXAMPLES, importing

SHIPPED = EXAMPLES.parent / "docs" / "figures" / "evidence"


@pytest.fixture
def evidence():
    with importing("") as module:
        yield module("evidence")


def test_the_tables_of_the_page_are_what_its_csvs_give_and_decisions_stand_in_the_sections_they_link_to(evidence):
    tables, page = evidence.evidence_tables, evidence.PAGE.read_text()
    assert tables.written(page, SHIPPED) == page
    assert tables.unsupported(page) == []
    assert tables.main(["--check"]) == 0
    # every run that is compared with a bf16 sampler has a line in one of the two tables of the grid
    runs = tables.grid_runs(SHIPPED)
    levels = {f"s{level}+{name}+int4" for level in tables.LEVELS for name in tables.CORRECTIONS}
    levels |= {f"s{level}+none+int4_aligned" for level in tables.LEVELS}
    judged = {arm for arm in runs if not arm.endswith("none+bf16") and tables.gaps(runs, arm)[0]}
    assert judged <= levels | set(tables.NAMES)


def test_what_a_page_says_otherwise_is_told(evidence, tmp_path, capsys):
    tables, page = evidence.evidence_tables, evidence.PAGE.read_text()
    begin = tables.BEGIN.format("the habits")
    with pytest.raises(ValueError, match="no place for the habits"):
        tables.written(page.replace(begin, ""), SHIPPED)
    other = tmp_path / "page.md"
    other.write_text(page.replace(begin, begin + "| an old line |\n"))
    assert tables.main(["--check", "--page", str(other)]) == 1
    assert "are not what the CSVs give" in capsys.readouterr().out
    assert tables.main(["--page", str(other)]) == 0
    assert other.read_text() == page
    invented = "**What to switch on when.**\n| [−0.123 without](#one-part) |\n\n## One part\n+0.123\n"
    assert tables.unsupported(invented) == ["−0.123 of “−0.123 without” is not in #one-part"]
    assert tables.unsupported(invented.replace("+0.123", "it is −0.123 here")) == []


@pytest.mark.slow
def test_tables_and_figures_are_made_again_from_the_csvs_alone(evidence, tmp_path, monkeypatch):
    monkeypatch.setattr(evidence.odds, "BOOTSTRAPS", 20)  # of the intervals, which are not compared
    folder, page = tmp_path / "evidence", tmp_path / "page.md"
    for file in SHIPPED.rglob("*"):
        if file.suffix in (".csv", ".json"):
            target = folder / file.relative_to(SHIPPED)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    page.write_text(evidence.PAGE.read_text())
    assert evidence.rebuild(folder, page) == []
    for file in SHIPPED.rglob("*"):
        made = folder / file.relative_to(SHIPPED)
        if file.suffix == ".png":
            assert made.read_bytes().startswith(b"\x89PNG")
        elif file.is_file() and file.name != "odds.md":
            assert made.read_text() == file.read_text(), file.name
    intervals = re.compile(r"\| \d\.\d{3}–\d\.\d{3} \|")
    assert intervals.sub("", page.read_text()) == intervals.sub("", evidence.PAGE.read_text())
    assert {file.name for file in folder.rglob("*")} == {file.name for file in SHIPPED.rglob("*")}


def test_studies_run_in_turn_with_the_time_that_is_left(evidence, tmp_path, monkeypatch, capsys):
    assert evidence.main(["--list", "--out", str(tmp_path), "--jobs", "3"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == ["evidence_study/run.py", "evidence_grid/grid.py"]
    studies = evidence.steps(tmp_path, 3, "1", missing=True)
    assert [command[0] for there in studies.values() for command in there] == [
        "evidence_grid/rest.py",
        "long_reasoning/warm_start.py",
        "long_reasoning/arms.py",
    ]
    for there in studies.values():
        for script, *_ in there:
            assert (EXAMPLES / script).is_file()
    (tmp_path / "long" / "adder").mkdir(parents=True)
    (tmp_path / "long" / "adder" / "config.json").write_text("{}")
    assert len(evidence.steps(tmp_path, 3, "1", missing=True)["long reasoning"]) == 1  # what was made is kept
    clock, called = iter([0.0, 30.0, 90.0, 120.0]), []
    monkeypatch.setattr(evidence, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    def ran(command, cwd):
        called.append(command[2:])
        return SimpleNamespace(returncode=len(called) == 2)

    monkeypatch.setattr(evidence, "subprocess", SimpleNamespace(run=ran))
    commands = {name: [[f"{name}.py", "--jobs", "1"]] for name in "abcd"}
    assert evidence.run_all(commands, 120.0) == ["b"]
    # the last has no time, and one that fails holds up no other
    assert called == [["--jobs", "1", "--minutes", left] for left in ("2.00", "1.50", "0.50")]


def test_what_was_run_takes_the_place_of_what_there_was(evidence, tmp_path):
    new = tmp_path / "grid" / "results" / "runs.csv"
    new.parent.mkdir(parents=True)
    new.write_text("new\n")
    evidence.gather(tmp_path, tmp_path / "evidence")
    assert (tmp_path / "evidence" / "grid" / "runs.csv").read_text() == "new\n"
    assert (tmp_path / "evidence" / "runs.csv").read_text() == (SHIPPED / "runs.csv").read_text()
