import threading
from operator import itemgetter
from types import SimpleNamespace

import pytest
import torch

from lit_qrl.callbacks import RLCallback
from lit_qrl.data.module import Problem, RolloutDataModule
from lit_qrl.loop.batching import rows_of
from lit_qrl.loop.iteration import roll_out
from lit_qrl.loop.state import IterationState
from lit_qrl.objective import DAPO, GRPO
from lit_qrl.rewards import ConstantReward, FunctionReward
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.types import Completion, no_all_reduce
from tests.functional.helpers import Ranks
from tests.tables import csv_rows
from tests.tiny_run import DigitReward, DigitTask, fit, parameters_of


class Dealt(RLCallback):
    def __init__(self):
        self.rollouts, self.parts = [], []

    def on_rollout_end(self, trainer, module, batch):
        self.rollouts.append(batch)
        self.parts.append([])

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.parts[-1].append(batch)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2), (3, 1, 4), (1, 4, 1)])
def test_each_pass_deals_every_sequence_once_and_groups_stay_whole(tmp_path, sizes):
    passes, mini_batches, micro_batches = sizes
    seen = Dealt()
    data = {"passes": passes, "mini_batches": mini_batches, "micro_batches": micro_batches}
    _, _, module_data = fit(tmp_path, callbacks=[seen], data=data)
    dataset = module_data.train_dataloader().dataset
    assert len(dataset) == passes * mini_batches * micro_batches
    orders = []
    for rollout, parts in zip(seen.rollouts, seen.parts, strict=True):
        assert len(parts) == len(dataset)
        per_pass = len(parts) // passes
        for start in range(0, len(parts), per_pass):
            dealt = parts[start : start + per_pass]
            rows = torch.cat([part.rows for part in dealt])
            assert sorted(rows.tolist()) == list(range(len(rollout)))
            for first in range(0, per_pass, micro_batches):
                mini = torch.cat([part.rows for part in dealt[first : first + micro_batches]])
                groups = rollout.group[mini].tolist()
                assert all(groups.count(group) == module_data.group_size for group in groups)
            orders.append(rows.tolist())
        for part in parts:
            kept = rollout.select(part.rows)
            assert torch.equal(part.batch.mask, kept.mask)
            assert torch.equal(part.batch.advantages, kept.advantages)
    if mini_batches > 1:
        assert len({tuple(order) for order in orders}) > 1  # every pass and iteration has an order of its own


class Constant(DigitReward):
    """The same score within a group for all prompts but those whose number is a multiple of three."""

    def __call__(self, samples):
        scores = super().__call__(samples)
        numbers = [int(sample.prompt.split(",")[0]) for sample in samples]
        return [score if number % 3 == 0 else 0.5 for score, number in zip(scores, numbers, strict=True)]


def test_groups_without_variance_are_drawn_again_and_the_last_draw_fills_up(tmp_path):
    seen = Dealt()
    objective = DAPO(filter_zero_variance=True, max_resample=1, overlong_penalty=None)
    task = DigitTask(reward=Constant())
    _, _, data = fit(tmp_path, callbacks=[seen], objective=objective, task=task, trainer={"max_epochs": 2})
    for rollout in seen.rollouts:
        assert len(rollout) == data.prompts_per_iteration * data.group_size
        assert rollout.group.tolist() == [i // data.group_size for i in range(len(rollout))]
    assert data.position > 2 * data.prompts_per_iteration  # more prompts than two iterations show
    undrawn = DAPO(filter_zero_variance=False, overlong_penalty=None)
    trainer, _, plain = fit(tmp_path / "plain", objective=undrawn, task=task)
    assert plain.position == 2 * data.prompts_per_iteration
    # a third of the numbers are scored, groups of the others are equal: counted under any objective
    assert 0 < float(trainer.callback_metrics["rollout/zero_variance_groups"]) <= 1


class Echo:
    """An engine whose completions repeat the prompt; it notes which prompts it was given.

    It is one with those of the other processes, of which each must ask when another does.
    """

    draws_together = True

    hands_out = False

    def __init__(self):
        self.seen, self.positions, self.calls = [], [], 0

    def generate(self, prompts, n, seed, progress, sampling, positions=()):
        self.calls += 1
        self.seen += [ids[0] for ids in prompts]
        self.positions += positions
        return [
            Completion(token_ids=list(ids), logprobs=[0.0], finish_reason="stop", version=0)
            for ids in prompts
            for _ in range(n)
        ]


def rank_of(world_size, rank, all_reduce, rounds, mini_batches=1, groups=8):
    """A learner with all that `roll_out` asks of it; of its prompts, those whose number is a multiple of 3 vary."""
    sizes = {"prompts_per_iteration": groups, "group_size": 2, "mini_batches": mini_batches}
    data = RolloutDataModule(DigitTask(), Echo(), seed=2, **sizes)
    trainer = SimpleNamespace(world_size=world_size, callbacks=[], progress_bar_callback=None, current_epoch=0)
    learner = SimpleNamespace(
        data=data,
        trainer=trainer,
        global_rank=rank,
        device="cpu",
        reduce=all_reduce,
        iteration=IterationState(),
        policy=SimpleNamespace(pad_token_id=0, dropout=False, decode=itemgetter(0)),
        objective=DAPO(max_resample=rounds),
    )
    trainer.lightning_module, data.trainer = learner, trainer
    data._problems["train"] = [Problem({}, [i], str(i)) for i in range(60)]
    data.reward = lambda samples, group_size, begun: (
        torch.tensor([float(one.completion % 3 == 0 and i % 2) for i, one in enumerate(samples)]),
        {},
        0.0,
    )
    return learner


@pytest.mark.parametrize("mini_batches", [1, 2])
@pytest.mark.parametrize("rounds", [1, 3, 10])
def test_ranks_that_resample_different_numbers_of_groups_hold_what_one_process_holds(rounds, mini_batches):
    def one(rank, all_reduce, ranks=2):
        learner = rank_of(ranks, rank, all_reduce, rounds, mini_batches)
        batch = roll_out(learner)
        posed = [problem.prompt_ids[0] for problem in learner.iteration.problems]
        assert posed == batch.tokens[::2, 0].tolist()  # one for each group that was kept
        assert batch.group.tolist() == [i // 2 for i in range(len(batch))]
        return learner.data, batch, learner.iteration.metrics.compute(all_reduce)

    alone, whole, metrics = one(0, no_all_reduce, 1)
    ranks = Ranks(2).run(one)
    seen = [data.engine.seen for data, _, _ in ranks]
    assert sorted(seen[0] + seen[1]) == sorted(alone.engine.seen)  # no prompt twice, and none left out
    assert len(seen[0]) != len(seen[1])
    assert len({data.engine.calls for data, _, _ in ranks}) == 1
    assert {data.position for data, _, _ in ranks} == {alone.position}
    drawn = {position for data, _, _ in ranks for position in data.engine.positions}
    assert drawn >= set(range(8))
    assert alone.engine.positions == []  # numbered by the call itself
    for data, batch, own_metrics in ranks:
        rows = rows_of(data.slots.own, 2)
        assert torch.equal(batch.tokens, whole.tokens[rows])
        assert torch.equal(batch.rewards, whole.rewards[rows])
        assert own_metrics == pytest.approx(metrics)
    varied = whole.rewards.view(-1, 2).sum(1) > 0
    assert bool(varied.all()) or rounds < 10
    assert set(metrics) == {"rollout/zero_variance_groups", "guard/reward_errors", "reward/unscored"}


class Undecided(DigitReward):
    """Gives the first completion of each prompt no score, and none of the second prompt's."""

    def __call__(self, samples):
        scores = super().__call__(samples)
        return [None if i % 4 == 0 or 4 <= i < 8 else score + i for i, score in enumerate(scores)]


def test_a_completion_without_a_score_is_in_no_statistic_and_no_loss(tmp_path):
    seen = Dealt()
    _, module, _ = fit(
        tmp_path,
        callbacks=[seen],
        objective=GRPO(scale="none", baseline="leave_one_out"),
        task=DigitTask(reward=Undecided()),
        trainer={"max_epochs": 1},
    )
    (rollout,) = seen.rollouts
    unscored = [i % 4 == 0 or 4 <= i < 8 for i in range(16)]
    assert rollout.rewards.isnan().tolist() == unscored
    assert (rollout.completion_length == 0).tolist() == unscored
    for i in range(16):
        known = [float(rollout.rewards[j]) for j in range(i // 4 * 4, i // 4 * 4 + 4) if not unscored[j] and j != i]
        wanted = 0.0 if unscored[i] else float(rollout.rewards[i]) - sum(known) / len(known)
        assert float(rollout.advantages[i]) == pytest.approx(wanted, abs=1e-5)
    metrics = csv_rows(tmp_path / "run" / "metrics.csv")[0]
    scored = rollout.rewards[~rollout.rewards.isnan()]
    assert float(metrics["reward/unscored"]) == 7 / 16
    assert float(metrics["reward/mean"]) == pytest.approx(float(scored.mean()), rel=1e-5)
    assert float(metrics["reward/digits"]) == pytest.approx(float(scored.mean()), rel=1e-5)
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())


class Silent(DigitReward):
    def __call__(self, samples):
        return [None] * len(samples)


def test_a_rollout_without_any_score_changes_nothing_and_the_run_goes_on(tmp_path):
    trainer, module, _ = fit(tmp_path / "silent", task=DigitTask(reward=Silent()), trainer={"max_epochs": 2})
    _, before, _ = fit(tmp_path / "constant", task=DigitTask(reward=ConstantReward()), trainer={"max_epochs": 2})
    assert trainer.current_epoch == 2
    assert torch.equal(parameters_of(module), parameters_of(before))  # equal rewards teach nothing either


def test_dynamic_sampling_looks_at_the_scores_that_were_given():
    learner = rank_of(1, 0, no_all_reduce, 1, groups=4)
    learner.iteration = IterationState()
    nan = float("nan")
    given = iter([[nan, 1.0, nan, nan, 0.0, 1.0, 1.0, 1.0], [0.0, 1.0] * 3])
    learner.data.reward = lambda samples, group_size, begun: (torch.tensor(next(given)), {}, 0.0)
    rollout = roll_out(learner)
    assert rollout.rewards.tolist() == [0.0, 1.0] * 4  # one group varied at first, three were drawn again


class Waiting(TransformersEngine):
    """Goes on after the first completions that it hands out when a reward has been called for them."""

    def __init__(self, called):
        super().__init__()
        self.called, self.given = called, []

    def generate(self, prompts, *arguments, finished=None, **options):
        def hand(drawn):
            self.given.append(len(drawn))
            finished(drawn)
            assert self.called.wait(30)

        return super().generate(prompts, *arguments, finished=None if finished is None else hand, **options)


class Silently(TransformersEngine):
    hands_out = False


def digits(completions):
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def test_a_reward_works_while_others_are_drawn_and_changes_nothing(tmp_path):
    called = threading.Event()

    def judge(completions):
        called.set()
        return digits(completions)

    engine, seen, apart = Waiting(called), Dealt(), Dealt()
    sizes = {"prompts_per_iteration": 4, "group_size": 4, "max_completion_tokens": 12}
    reward = FunctionReward(judge, concurrency=2)
    _, early, _ = fit(tmp_path / "early", callbacks=[seen], engine=engine, task=DigitTask(reward=reward), data=sizes)
    assert engine.given[0] < 16  # some go on
    after = FunctionReward(digits, concurrency=2, name="judge")
    _, late, _ = fit(tmp_path / "late", callbacks=[apart], engine=Silently(), task=DigitTask(reward=after), data=sizes)
    for one, other in zip(seen.rollouts, apart.rollouts, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.rewards, other.rewards)
    assert torch.equal(parameters_of(early), parameters_of(late))
    rows = [csv_rows(tmp_path / name / "run" / "metrics.csv") for name in ("early", "late")]
    assert all(float(row["rollout/reward_seconds_hidden"]) > 0 for row in rows[0])
    assert "rollout/reward_seconds_hidden" not in rows[1][0]
