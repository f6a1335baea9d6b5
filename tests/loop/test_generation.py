from types import SimpleNamespace

import pytest

from lit_qrl.loop.contracts import Problem
from lit_qrl.loop.generation import draw, progress_of, scoring_progress
from lit_qrl.loop.hooks import RLCallback
from lit_qrl.rollout.engine import EngineDiedError


def problems(*prompts):
    return [Problem({}, ids, "") for ids in prompts]


class Mortal:
    def __init__(self, deaths):
        self.deaths, self.calls = deaths, 0

    def generate(self, prompts, n, seed, progress, sampling):
        self.calls += 1
        if self.calls <= self.deaths:
            raise EngineDiedError("gone")
        return ["drawn"] * n


class Reviver(RLCallback):
    def on_engine_died(self, trainer, module, error):
        return True


def learner(deaths, *callbacks):
    trainer = SimpleNamespace(callbacks=list(callbacks), progress_bar_callback=None)
    return SimpleNamespace(trainer=trainer, data=SimpleNamespace(engine=Mortal(deaths)))


def test_an_engine_that_nothing_revives_ends_the_draw():
    given = learner(1, RLCallback())
    with pytest.raises(EngineDiedError, match="gone"):
        draw(given, problems([1]), None, 1, 0, "rollout")
    assert given.data.engine.calls == 1


def test_the_bar_moves_where_it_can():
    moved = []
    bar = SimpleNamespace(
        update_generation=lambda *given: moved.append(given), update_scoring=lambda *given: moved.append(given)
    )
    trainer = SimpleNamespace(progress_bar_callback=bar)
    progress_of(trainer, "rollout", 8)(3, 20)
    scoring_progress(trainer, "judge")(3, 8)
    assert moved == [("rollout", 3, 8, 20), ("judge", 3, 8)]
    for other in (object(), None):
        assert progress_of(SimpleNamespace(progress_bar_callback=other), "rollout", 8) is None
        assert scoring_progress(SimpleNamespace(progress_bar_callback=other), "judge") is None
    assert scoring_progress(None, "judge") is None


class Handing(Mortal):
    hands_out = True

    def generate(self, prompts, n, seed, progress, sampling, finished=None):
        finished({0: "early"})
        return super().generate(prompts, n, seed, progress, sampling)


class Judge:
    early = True

    def __init__(self):
        self.seen = []

    def __call__(self, drawn):
        self.seen.append(drawn)

    def again(self):
        self.seen.clear()


def test_what_a_dead_engine_handed_out_is_forgotten():
    taught, judge = learner(1, Reviver()), Judge()
    taught.data.engine = Handing(1)
    assert draw(taught, problems([1]), None, 2, 5, "rollout", judging=judge) == ["drawn"] * 2
    assert judge.seen == [{0: "early"}]
