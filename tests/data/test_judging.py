from types import SimpleNamespace

from lit_qrl.data.judging import Judging
from lit_qrl.types import Completion


class Noted:
    """Stands for the rewards."""

    def __init__(self):
        self.added, self.begun_anew, self.dropped = [], 0, 0
        self.seconds = 1.5

    def add(self, samples):
        self.added.append(samples)

    def again(self):
        self.begun_anew += 1

    def drop(self):
        self.dropped += 1


def one(*tokens):
    return Completion(token_ids=list(tokens), logprobs=[0.0] * len(tokens), finish_reason="stop", version=0)


def test_completions_are_handed_on_once_and_forgotten_where_others_were_drawn():
    noted = Noted()
    judging = Judging(noted, lambda number, completion: (number, completion.token_ids))
    judging({2: one(5)})
    judging({2: one(5), 0: one(6)})
    assert noted.added == [{2: (2, [5])}, {0: (0, [6])}]
    assert judging.of([one(6), one(7), one(5)]) is noted
    assert noted.begun_anew == 0
    judging.of([one(6), one(7), one(8)])
    assert noted.begun_anew == 1
    judging({2: one(8)})
    assert noted.added[-1] == {2: (2, [8])}
    assert judging.seconds == 1.5
    judging.close()
    assert noted.dropped == 1


def test_a_sample_that_cannot_be_made_is_no_fault_of_the_engine():
    noted = Noted()
    judging = Judging(noted, lambda number, completion: SimpleNamespace().missing)
    judging({0: one(1)})
    judging({1: one(2)})
    assert noted.added == []
    assert judging.of([one(1), one(2)]) is noted
