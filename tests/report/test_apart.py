import pytest

from lit_qrl.report import live as apart
from lit_qrl.report.live import PageApart
from tests.callbacks.tiny_loop import Module, trainer_of


def test_one_page_at_a_time_and_the_next_tells_of_the_last(tmp_path, monkeypatch):
    done = tmp_path / "done"
    waits = f"import pathlib, sys, time\nwhile not pathlib.Path({str(done)!r}).exists(): time.sleep(0.01)\n"
    monkeypatch.setattr(apart, "CODE", waits + "pathlib.Path(sys.argv[1], 'page').touch(); sys.exit(3)")
    page = PageApart()
    assert page.begin(tmp_path)
    first = page._process
    assert page.begin(tmp_path)
    assert page._process is first  # which is not done
    done.touch()
    assert first.wait(30) == 3
    assert (tmp_path / "page").exists()
    assert not page.begin(tmp_path)
    assert page._process is not first
    page.end()
    assert page._process is None
    page.end()


def test_a_page_that_is_being_made_ends_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(apart, "CODE", "import time; time.sleep(60)")
    page = PageApart()
    page.begin(tmp_path)
    process = page._process
    page.end()
    assert process.returncode < 0


@pytest.mark.slow
def test_the_process_makes_the_page(tmp_path):
    trainer_of(tmp_path, [], 2, enable_progress_bar=False).fit(Module())
    page = PageApart()
    page.begin(tmp_path)
    assert page._process.wait(120) == 0
    assert "<html" in (tmp_path / "report" / "index.html").read_text()
