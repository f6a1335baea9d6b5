import os
import re
import threading
import time

import pytest

from lit_qrl.data.environment import MultiTurnTask
from lit_qrl.errors import ConfigError
from lit_qrl.loop.turns import Conversations
from lit_qrl.rewards.base import Sample
from lit_qrl.rewards.simple import ConstantReward
from lit_qrl.types import Completion, Episode
from tests.loop.test_turns import Echo


def test_a_conversation_is_solved_from_a_score_on():
    played = [Episode(score=score, ended="done", turns=1) for score in (0.4, 0.5, None)]
    samples = [Sample("", "", episode=one) for one in (*played, None)]
    assert Echo(solved_at=0.5).is_correct(samples) == [False, True, False, False]
    assert [reward.name for reward in Echo().rewards] == ["episode"]
    assert [reward.name for reward in Echo(rewards=[ConstantReward()]).rewards] == ["constant"]


class Guess(MultiTurnTask):
    """Says the number of the answer, and in whose process; a row says what it does at the second."""

    name = "guess"

    def train_rows(self):
        return []

    def evaluation_rows(self):
        return []

    def prompt(self, row):
        return "?"

    def start(self, row):
        self.started = True
        return {"does": row["does"], "answers": [], "lock": threading.Lock() if row["does"] == "lock" else None}

    def reply(self, state, answer):
        state["answers"].append(answer)
        if state["does"] == "hold":
            re.match(r"(a+)+$", "a" * 60 + "b")
        if state["does"] == "raise":
            raise KeyError("no such tool")
        return f"{len(state['answers'])} {os.getpid()}" if len(state["answers"]) < 3 else None

    def finish(self, state):
        return float(len(state["answers"]))


def played(task, *kinds):
    """The episodes of rows that do so, and all that the environment said."""
    heard = []
    rows, answer = (
        [{"does": kind} for kind in kinds],
        Completion(token_ids=[7], logprobs=[0.0], finish_reason="stop", version=0),
    )

    def encode(messages):
        heard.append(messages[0]["content"])
        return [5]

    with Conversations(task, rows, [[1]] * len(rows), encode, str, 40, seed=0) as talks:
        while talks.open:
            for turn in talks.waiting("any"):
                talks.answered(turn, answer)
        return [one.episode for one in talks.completions()], heard


@pytest.fixture
def guess():
    task = Guess(time_limit=5.0)
    yield task
    task.close()


def test_methods_run_in_processes_that_a_limit_ends(guess):
    begun, threads = time.monotonic(), threading.active_count()
    episodes, heard = played(guess, "", "hold", "raise", "", "hold")
    assert [one.ended for one in episodes] == ["done", "time", "error", "done", "time"]
    assert [one.score for one in episodes] == [3.0, None, None, 3.0, None]
    assert "KeyError: 'no such tool'" in episodes[2].error
    assert {int(text.split()[1]) for text in heard}.isdisjoint({os.getpid()})
    assert not hasattr(guess, "started")  # what a method writes to the task stays in its process
    assert time.monotonic() - begun < 120
    played(guess, "", "")
    assert threading.active_count() - threads < 10


def test_states_that_pickle_cannot_take_keep_a_task_in_this_process(caplog):
    task = Guess(time_limit=60.0)
    with caplog.at_level("INFO"):
        (episode,), heard = played(task, "lock")
    assert (episode.score, heard[0]) == (3.0, f"1 {os.getpid()}")
    assert "Guess runs in threads of this process, since its states are such as pickle cannot take." in caplog.text
    asked = Guess(time_limit=60.0, processes=True)
    (episode,), _ = played(asked, "lock")
    assert "Set processes to false" in episode.error
    for one in (task, asked):
        one.close()
    local = type("Local", (Guess,), {"__module__": "nowhere"})
    with pytest.raises(ConfigError, match="Local cannot run in processes of its own: pickle cannot take it"):
        local(processes=True).prepare()
