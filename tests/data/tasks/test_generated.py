"""What holds for every task whose problems are drawn."""

import hashlib
import json

import pytest

from lit_qrl.data.tasks import Countdown, PrefixSum, Sudoku
from lit_qrl.data.tasks.generated import is_held_out, key_hash
from lit_qrl.errors import ConfigError
from tests.rewards.datasets import DATA

# The first 16 hexadecimal digits of SHA-256 of all rows as JSON: a run is repeated only if its problems are.
DRAWN = [
    (Countdown, {}, "d7eefb63776c94e0"),
    (Countdown, {"seed": 3, "max_number": 100, "max_target": 100, "train_size": 2000}, "f601013f1d030474"),
    (Sudoku, {"train_size": 1000}, "3e4893aa02946a9d"),
    (Sudoku, {"unique": False, "train_size": 3000, "seed": 5}, "443a003b7ef20e0e"),
]


@pytest.fixture(params=[Countdown, Sudoku, PrefixSum])
def kind(request):
    return request.param


def keys(task, rows):
    return [task.key(row) for row in rows]


@pytest.mark.parametrize(("kind", "settings", "digest"), DRAWN)
def test_the_problems_of_a_seed_never_change(kind, settings, digest):
    task = kind(**settings)
    rows = json.dumps([list(task.train_rows()), list(task.evaluation_rows())])
    assert hashlib.sha256(rows.encode()).hexdigest()[:16] == digest


def test_no_seed_trains_on_what_another_evaluates(kind):
    tasks = [kind(train_size=2000, evaluation_size=200, seed=seed) for seed in range(3)]
    train = {key for task in tasks for key in keys(task, task.train_rows())}
    evaluation = [frozenset(keys(task, task.evaluation_rows())) for task in tasks]
    assert not train & frozenset.union(*evaluation)
    assert len(set(evaluation)) == 3
    assert not any(map(is_held_out, train))


def test_the_draw_repeats_and_sides_do_not_depend_on_each_other(kind):
    one, two = kind(train_size=300, evaluation_size=50), kind(train_size=100, evaluation_size=50)
    assert one.evaluation_rows() == two.evaluation_rows()
    assert one.train_rows()[:100] == two.train_rows()
    assert len(set(keys(one, one.train_rows()))) == 300


@pytest.mark.parametrize(
    ("task", "file", "count"),
    [
        (Countdown(max_number=100, max_target=100, train_size=3000), "countdown.jsonl", 128),
        (Sudoku(unique=False, train_size=20_000, evaluation_size=2000), "sudoku4x4.csv", 250),
    ],
)
def test_published_problems_are_known_by_their_hashes_and_never_drawn(task, file, count):
    public, known = keys(task, task.read(str(DATA / file))), task.public_tests.read_text().split()
    assert len(public) == 40
    assert len(set(known)) == len(known) == count
    assert {key_hash(key) for key in public} <= set(known)
    assert not {*public} & {*keys(task, task.train_rows()), *keys(task, task.evaluation_rows())}


def test_a_published_problem_is_passed_over_when_it_comes_up(kind, tmp_path, monkeypatch):
    plain = kind(train_size=50)
    published = tmp_path / "published.txt"
    published.write_text(key_hash(plain.key(plain.train_rows()[0])))
    monkeypatch.setattr(kind, "public_tests", published)
    assert kind(train_size=50).train_rows()[:49] == plain.train_rows()[1:]


def test_rewards_that_share_a_name_are_refused(kind):
    with pytest.raises(ConfigError, match="Two rewards are both named"):
        kind(rewards=[kind.reward(), kind.reward()])
