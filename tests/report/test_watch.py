import json
import os
import socket

import pytest

from lit_qrl.report.live import QUIET_SECONDS, goes_on, watch

GONE = 2**22 + 1
"""A process number above the system's largest."""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "metrics.csv").write_text("epoch,step,reward/mean\n0,0,0.5\n")
    say(tmp_path, "start")
    hold(tmp_path)
    return tmp_path


def say(folder, kind):
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": kind}) + "\n")


def hold(folder, pid=None, host=None):
    holder = {"pid": pid or os.getpid(), "host": host or socket.gethostname()}
    (folder / ".lock.json").write_text(json.dumps(holder))


class Wait:
    """Instead of sleeping: one thing that happens in the run at each look."""

    def __init__(self, *happenings):
        self.happenings = list(happenings)

    def __call__(self, seconds):
        self.happenings.pop(0)()


def nothing():
    pass


def watched(folders, wait):
    written = []
    watch(folders, lambda live: written.append(live) or folders[0], 5.0, wait)
    assert not wait.happenings
    return written


def test_it_is_written_when_a_file_changes_and_a_last_time_at_the_end(run):
    def iterate():
        with (run / "metrics.csv").open("a") as file:
            file.write("1,1,0.6\n")

    wait = Wait(nothing, iterate, nothing, lambda: (run / "samples.jsonl").touch(), (run / ".lock.json").unlink)
    say(run, "finish")  # the diary is closed before the process is
    assert watched([run], wait) == [True, True, True, False]


def test_a_killed_run_ends_it(run):
    assert watched([run], Wait(lambda: hold(run, GONE))) == [True, False]


def test_ctrl_c_ends_it_with_a_page_that_stays_as_it_is(run):
    def interrupt():
        raise KeyboardInterrupt

    assert watched([run], Wait(nothing, interrupt)) == [True, False]


def test_of_several_runs_the_last_ends_it(run, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    hold(other)
    wait = Wait(lambda: hold(run, GONE), lambda: hold(other, GONE))
    assert watched([run, other], wait) == [True, False]


def test_a_run_that_is_over_is_written_once(run):
    hold(run, GONE)
    assert watched([run], Wait()) == [False]


@pytest.mark.parametrize("kind, live", [("start", True), ("guard", True), ("resume", True), ("interrupt", False)])
def test_of_another_host_the_diary_says_whether_it_goes_on(run, kind, live):
    hold(run, host="elsewhere")
    say(run, kind)
    written = (run / "events.jsonl").stat().st_mtime
    assert goes_on(run, lambda: written) is live
    assert not goes_on(run, lambda: written + QUIET_SECONDS + 1)
