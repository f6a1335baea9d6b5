"""The stream of prompts and the evaluation's draws; whole runs: tests/test_module.py."""

from types import SimpleNamespace

import pytest
import torch

from lit_qrl.data.benchmark import Benchmark, samples_of
from lit_qrl.data.module import RolloutDataModule
from lit_qrl.data.problems import Problem
from lit_qrl.errors import ConfigError, StoppedError
from lit_qrl.rollout.diffusion.engine import DiffusionEngine
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.vllm.engine import VLLMEngine
from lit_qrl.run.event_log import EVENTS_FILE, read_jsonl
from lit_qrl.types import Completion
from tests.loop.test_turns import Echo
from tests.tiny_run import DigitReward, DigitTask, build, fit

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
    own = [slot for slot in range(count) if slot % data.slots.width in data.slots.columns]
    return [problem.row["question"] for _ in range(times) for problem in data.next_problems(count, own)]


def test_every_pass_over_the_problems_has_each_once_in_an_order_of_its_own():
    data = module()
    laps = [drawn(data, 5, 2) for _ in range(3)]
    assert all(sorted(lap, key=int) == [str(i) for i in range(10)] for lap in laps)
    assert len({tuple(lap) for lap in laps}) == 3
    assert [drawn(module(), 5, 2) for _ in range(2)] == [laps[0]] * 2
    assert drawn(module(seed=1), 5, 2) != laps[0]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_what_one_process_would_draw(ranks):
    sizes = {"prompts_per_iteration": 8, "mini_batches": 2, "problems": 30}
    whole = drawn(module(**sizes), 8, 5)
    parts = [module(rank=rank, world_size=ranks, **sizes) for rank in range(ranks)]
    shares = [[drawn(part, 8) for part in parts] for _ in range(5)]
    for i, share in enumerate(shares):
        dealt = {
            slot: q for part, own in zip(parts, share, strict=True) for slot, q in zip(part.slots.own, own, strict=True)
        }
        assert [dealt[slot] for slot in range(8)] == whole[i * 8 : (i + 1) * 8]
    assert {part.position for part in parts} == {40}
    assert {part.prompts_per_rank for part in parts} == {8 // ranks}


def test_a_rank_draws_the_numbers_that_it_asks_for_and_the_stream_moves_on_for_all():
    alone = module()
    whole = drawn(alone, 4) + drawn(alone, 4)
    rank = module()
    assert [problem.row["question"] for problem in rank.next_problems(4, [1, 3])] == [whole[1], whole[3]]
    assert rank.next_problems(3, []) == []
    assert [problem.row["question"] for problem in rank.next_problems(1, [0])] == [whole[7]]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"prompts_per_iteration": 2}, r"multiple of 4 ranks × 1 mini-batches.*Given: 2.*Set it to 4.*divisor of 2"),
        ({"prompts_per_iteration": 12, "mini_batches": 2}, "multiple of 4 ranks × 2.*Set it to 16"),
        ({"prompts_per_iteration": 4, "group_size": 2, "micro_batches": 4}, "fewer sequences.*at most 2.*Lower data"),
    ],
)
def test_more_ranks_than_groups_or_sequences_are_refused(sizes, message):
    data = module(world_size=4, **sizes)
    with pytest.raises(ConfigError, match=message):
        data.setup("fit")


def test_an_unfinished_rollout_is_drawn_again_and_a_restored_stream_goes_on():
    data = module()
    drawn(data, 4)
    data.schedule.rollout_begins(data.position)
    expected = drawn(data, 4)
    assert data.state_dict() == {"position": 4}
    data.load_state_dict(data.state_dict())
    data.schedule.rollout_begins(data.position)
    assert drawn(data, 4) == expected
    data.schedule.update_begins(0)
    assert data.state_dict() == {"position": 8}
    again = module()  # a stream that is restored goes on where it was
    again.load_state_dict(data.state_dict())
    assert drawn(again, 4, 3) == drawn(data, 4, 3)


def test_samples_are_prompt_major():
    data = module()
    problems = data._problems["train"][:2]
    completions = [Completion(token_ids=[i], logprobs=[0.0], finish_reason="stop", version=0) for i in range(6)]
    samples = samples_of(problems, completions, data.task, data.module.policy.decode)
    assert [(sample.prompt, sample.completion) for sample in samples] == [(str(i // 3), str(i)) for i in range(6)]
    total, parts, failed = data.reward(samples, 3)
    assert total.tolist() == parts["digits"].tolist() == [1.0] * 6
    assert failed == 0.0


def test_what_a_rollout_solved_is_known_of_a_reward_that_judges_the_evaluation_too():
    data = module()
    parts = {"digits": torch.tensor([1.0, 0.5, torch.nan])}
    assert data.solved(parts) is None
    data.task.judge = DigitReward()
    assert data.solved(parts).tolist() == [True, False, False]
    data.task.judge = Judge()
    assert data.solved(parts) is None


def test_the_former_name_of_the_limit_of_an_evaluation_counts():
    data = RolloutDataModule(DigitTask(), TransformersEngine(), evaluation_size=4)
    assert (data.evaluation_limit, data.evaluations[0].size) == (4, 4)


def test_an_evaluation_may_have_a_length_and_a_nucleus_of_its_own(tmp_path):
    own = {"evaluation_completion_tokens": 3, "evaluation_top_p": 0.5, "evaluation_samples": 2}
    other = DigitTask(rows=12)
    benchmarks = [
        Benchmark(task=other, name="hard", samples=4, pass_at=[2, 4], completion_tokens=7, greedy=False, size=5)
    ]
    trainer, module, data = build(tmp_path, data={**own, "benchmarks": benchmarks}, trainer={"limit_val_batches": 1.0})
    asked = []
    generate = data.engine.generate

    def noted(prompts, n, seed, progress, sampling):
        asked.append((len(prompts), n, sampling.max_tokens, sampling.temperature, sampling.top_p))
        return generate(prompts, n, seed, progress, sampling)

    data.engine.generate = noted
    (found,) = trainer.validate(module, datamodule=data, verbose=False)
    assert asked == [(8, 1, 3, 0.0, 1.0), (8, 2, 3, 1.0, 0.5), (5, 4, 7, 1.0, 0.5)]
    names = ["greedy_pass@1", "accuracy", "pass@2", "hard/pass@1", "hard/pass@2", "hard/pass@4"]
    accuracies = {f"val/{name}{bound}" for name in names for bound in ("", "_ci_low", "_ci_high")}
    assert set(found) == accuracies | {"val/greedy_stopped", "val/stopped", "val/hard/stopped"}
    assert found["val/hard/pass@1"] <= found["val/hard/pass@2"] <= found["val/hard/pass@4"]
    for name in names:
        assert found[f"val/{name}_ci_low"] <= found[f"val/{name}"] <= found[f"val/{name}_ci_high"]


def test_training_problems_of_a_benchmark_are_removed_and_its_prompts_never_dropped(tmp_path, caplog):
    task = DigitTask(rows=24)
    benchmark = DigitTask(rows=10)  # its held-out rows, 2 to 9, are among those that the task trains on
    longer = Benchmark(task=DigitTask(rows=24), name="longer")  # prompts of 6 tokens
    data = {"benchmarks": [Benchmark(task=benchmark), longer], "evaluate_task": False, "max_prompt_tokens": 5}
    with caplog.at_level("INFO"):
        trainer, module, loader = build(tmp_path, task=task, data=data, trainer={"max_epochs": 1})
        trainer.fit(module, datamodule=loader)
    trained = {problem.row["question"] for problem in loader._problems["train"]}
    evaluated, kept = ([problem.row["question"] for problem in one.problems] for one in loader.evaluations)
    assert kept == [row["question"] for row in task.evaluation_rows()]
    assert evaluated == [row["question"] for row in benchmark.evaluation_rows()]
    assert len(evaluated) == 8
    assert not trained & set(evaluated)
    assert "training problems that a benchmark has" in caplog.text
    assert loader.longest_evaluation == 6 + loader.max_completion_tokens


def test_the_engine_is_told_of_longer_evaluations(tmp_path):
    _, _, data = build(tmp_path, data={"evaluation_completion_tokens": 100})
    data.evaluations[0].problems = [Problem({}, [1] * 9, "")]
    assert data.longest_evaluation == 109


def test_the_seed_is_that_of_the_run_unless_given(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "17")
    task, engine = DigitTask(), TransformersEngine()
    assert RolloutDataModule(task, engine).base_seed == 17
    assert RolloutDataModule(task, engine, seed=3).base_seed == 3
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert RolloutDataModule(task, engine).base_seed == 0


@pytest.mark.parametrize("engine", [VLLMEngine(tensor_parallel_size=2), DiffusionEngine()], ids=["parts", "masked"])
def test_a_task_of_several_turns_needs_an_engine_that_converses(tmp_path, engine):
    trainer, module, data = build(tmp_path, engine=engine, task=Echo())
    data.trainer, trainer.strategy._lightning_module = trainer, module
    named = "VLLMEngine of several processes" if engine.draws_together else "DiffusionEngine"
    with pytest.raises(ConfigError, match=f"Echo has several turns, which {named} does not draw"):
        data.setup("fit")


class Judge(DigitReward):
    """A service that goes away after its first call."""

    name = "judge"
    calls = 0

    def __call__(self, samples):
        self.calls += 1
        if self.calls > 1:
            raise ConnectionError("service is away")
        return super().__call__(samples)


def test_a_run_whose_judge_stays_away_stops_with_a_checkpoint_of_before(tmp_path):
    judge = Judge()
    with pytest.raises(StoppedError, match=r"'judge' .*failed 3 times in a row.*service is away.*last good checkpoint"):
        fit(tmp_path, task=DigitTask(reward=judge), trainer={"max_epochs": 9})
    assert judge.calls == 4
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] >= 1
    events = read_jsonl(tmp_path / "run" / EVENTS_FILE)
    assert [event["cause"] for event in events if event["kind"] == "stopped"] == ["reward_failed"]


def test_weights_of_rewards_are_set_by_name(tmp_path):
    task = DigitTask()
    RolloutDataModule(task, TransformersEngine(), reward_weights={"digits": 0.25})
    assert task.rewards[0].weight == 0.25
