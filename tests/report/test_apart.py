import sys
from subprocess import Popen

import pytest

from lit_qrl.callbacks import Report
from lit_qrl.callbacks.report import _page_apart
from tests.callbacks.tiny_loop import Module, trainer_of


def test_one_page_at_a_time_which_ends_with_the_run(tmp_path, monkeypatch):
    begun = []

    def page_apart(folder):
        begun.append(Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        return begun[-1]

    monkeypatch.setattr("lit_qrl.callbacks.report._page_apart", page_apart)
    trainer_of(tmp_path, [Report(every_n_iterations=1)], 3, enable_progress_bar=False).fit(Module())
    (page,) = begun
    assert page.returncode < 0


@pytest.mark.slow
def test_the_process_makes_the_page(tmp_path):
    trainer_of(tmp_path, [], 2, enable_progress_bar=False).fit(Module())
    assert _page_apart(str(tmp_path)).wait(120) == 0
    assert "<html" in (tmp_path / "report" / "index.html").read_text()
