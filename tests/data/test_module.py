"""The stream of prompts and the evaluation's draws; whole runs: tests/test_module.py."""

from types import SimpleNamespace

import pytest

from lit_qrl.data.module import Problem, RolloutDataModule
from lit_qrl.errors import ConfigError
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.types import Completion
from tests.tiny_run import DigitTask

SIZES = {"prompts_per_iteration": 4, "group_size": 2, "seed": 0}


def module(rank=0, world_size=1, problems=10, **options):
    """A data module with so many problems, seen by one rank of several."""
    made = RolloutDataModule(DigitTask(), TransformersEngine(), **{**SIZES, **options})
    policy = SimpleNamespace(decode=lambda ids: "".join(map(str, ids)), stop_token_ids=(1,))
    trainer = SimpleNamespace(world_size=world_size, callbacks=[], progress_bar_callback=None)
    trainer.lightning_module = SimpleNamespace(policy=policy, global_rank=rank, trainer=trainer)
    made.trainer = trainer
    made._problems["train"] = [Problem({"question": str(i)}, [i], str(i)) for i in range(problems)]
    return made


def drawn(data, count, times=1):
    counts = [count] * data.trainer.world_size
    return [problem.row["question"] for _ in range(times) for problem in data.next_problems(counts)]


def test_every_pass_over_the_problems_has_each_once_in_an_order_of_its_own():
    data = module()
    laps = [drawn(data, 5, 2) for _ in range(3)]
    assert all(sorted(lap, key=int) == [str(i) for i in range(10)] for lap in laps)
    assert len({tuple(lap) for lap in laps}) == 3
    assert [drawn(module(), 5, 2) for _ in range(2)] == [laps[0]] * 2
    assert drawn(module(seed=1), 5, 2) != laps[0]


def test_ranks_share_what_one_process_would_draw():
    alone = module()
    whole = [drawn(alone, 4) for _ in range(5)]
    ranks = [module(rank=rank, world_size=2) for rank in range(2)]
    assert [drawn(ranks[0], 2) + drawn(ranks[1], 2) for _ in range(5)] == whole
    assert [rank.prompts_per_rank for rank in ranks] == [2, 2]


def test_ranks_that_draw_different_numbers_share_the_stream_too():
    alone = module()
    whole = drawn(alone, 6) + drawn(alone, 4)
    ranks = [module(rank=rank, world_size=3) for rank in range(3)]
    shares = [
        [problem.row["question"] for problem in rank.next_problems(counts)]
        for counts in ([3, 0, 3], [0, 4, 0])
        for rank in ranks
    ]
    assert [len(share) for share in shares] == [3, 0, 3, 0, 4, 0]
    assert [question for share in shares for question in share] == whole
    assert [rank.position for rank in ranks] == [10, 10, 10]


def test_a_restored_stream_goes_on_where_it_was():
    data = module()
    drawn(data, 4)
    state = data.state_dict()
    expected = drawn(data, 4, 3)
    again = module()
    again.load_state_dict(state)
    assert drawn(again, 4, 3) == expected


def test_an_unfinished_rollout_is_drawn_again():
    data = module()
    drawn(data, 4)
    rolling = data.rolling_out()
    rolling.__enter__()  # and never left
    expected = drawn(data, 4)
    assert data.state_dict() == {"position": 4}
    data.load_state_dict(data.state_dict())
    with data.rolling_out():
        assert drawn(data, 4) == expected
    assert data.state_dict() == {"position": 8}


def test_samples_are_prompt_major():
    data = module()
    problems = data._problems["train"][:2]
    completions = [Completion(token_ids=[i], logprobs=[0.0], finish_reason="stop", version=0) for i in range(6)]
    samples = data.samples(problems, completions)
    assert [(sample.prompt, sample.completion) for sample in samples] == [(str(i // 3), str(i)) for i in range(6)]
    total, parts, failed = data.reward(problems, completions)
    assert total.tolist() == parts["digits"].tolist() == [1.0] * 6
    assert failed == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({name: 0}, rf"data\.{name} is too small.*at least 1")
            for name in ("group_size", "passes", "evaluation_samples")
        ),
        ({"temperature": 0.0}, r"data\.temperature must be positive.*evaluation_greedy"),
        ({"top_p": 0.0}, r"data\.top_p is out of range"),
        ({"top_p": 1.1}, r"data\.top_p is out of range"),
        ({"mini_batches": 3}, r"multiple of 3\. Given: 4"),
        ({"mini_batches": 2, "micro_batches": 3}, r"divisor of its 4 sequences\. Given: 3"),
    ],
)
def test_sizes_that_cannot_work_are_refused_at_construction(options, message):
    with pytest.raises(ConfigError, match=message):
        RolloutDataModule(DigitTask(), TransformersEngine(), **{**SIZES, **options})


def test_the_seed_is_that_of_the_run_unless_given(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "17")
    task, engine = DigitTask(), TransformersEngine()
    assert RolloutDataModule(task, engine).base_seed == 17
    assert RolloutDataModule(task, engine, seed=3).base_seed == 3
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert RolloutDataModule(task, engine).base_seed == 0


def test_nothing_is_asked_of_a_module_that_is_not_there():
    with pytest.raises(RuntimeError, match="not attached"):
        _ = RolloutDataModule(DigitTask(), TransformersEngine()).module
