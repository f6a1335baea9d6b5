"""Processes side by side: what they give arrives as it comes, and how each ended is said."""

import os
import signal
import threading
from collections import defaultdict

import torch

from tests.families.jobs import LATE, side_by_side


def two(send):
    send(torch.get_num_threads())
    send("second")


def killed(send):
    send("before")
    os.kill(os.getpid(), signal.SIGKILL)


def failing(send):
    os._exit(3)


def stuck(send):
    send(os.getpid())
    threading.Event().wait()


def collected(tasks, **options):
    given, ends = defaultdict(list), {}
    for key, found, ended in side_by_side([(task.__name__, task) for task in tasks], **options):
        if ended is None:
            given[key].append(found)
        else:
            ends[key] = ended
    return dict(given), ends


def test_what_tasks_give_and_how_they_end():
    given, ends = collected([two, killed, failing], jobs=2)
    assert given == {"two": [1, "second"], "killed": ["before"]}
    assert ends == {"two": "", "killed": "ended by signal SIGKILL", "failing": "ended with status 3"}


def test_what_is_not_through_in_time_is_stopped_and_nothing_more_begun():
    given, ends = collected([stuck, two], jobs=1, seconds=2.0)
    (process,) = given["stuck"]
    assert ends == {"stuck": LATE}
    assert not os.path.exists(f"/proc/{process}")
