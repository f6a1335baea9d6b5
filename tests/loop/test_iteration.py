from types import SimpleNamespace

import pytest
import torch

from lit_qrl.callbacks import RLCallback
from lit_qrl.data.dataset import RolloutDataset
from lit_qrl.data.module import Problem, RolloutDataModule
from lit_qrl.loop.iteration import roll_out
from lit_qrl.loop.state import IterationState
from lit_qrl.objective import DAPO, GRPO
from lit_qrl.types import Completion, no_all_reduce
from tests.functional.helpers import Ranks
from tests.tiny_run import DigitReward, DigitTask, fit


class Dealt(RLCallback):
    """Remembers the rollout and every micro-batch of the iterations."""

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
    _, module, module_data = fit(tmp_path, callbacks=[seen], data=data)
    dataset = RolloutDataset(module)
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


def test_a_mini_batch_s_denominator_is_the_same_in_all_its_parts(tmp_path):
    seen = Dealt()
    data = {"mini_batches": 2, "micro_batches": 4}
    objective = GRPO(scale="none", reduction="token")
    fit(tmp_path, callbacks=[seen], data=data, objective=objective, trainer={"max_epochs": 1})
    (parts,) = seen.parts
    for start in (0, 4):
        tokens = sum(int(part.batch.mask.sum()) for part in parts[start : start + 4])
        assert {float(part.total) for part in parts[start : start + 4]} == {float(tokens)}


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
    plain = fit(tmp_path / "plain", objective=DAPO(filter_zero_variance=False, overlong_penalty=None), task=task)[2]
    assert plain.position == 2 * data.prompts_per_iteration


class Echo:
    """An engine whose completions repeat the prompt; it notes which prompts it was given."""

    def __init__(self):
        self.seen = []

    def generate(self, prompts, n, seed, progress, sampling):
        self.seen += [ids[0] for ids in prompts]
        return [
            Completion(token_ids=list(ids), logprobs=[0.0], finish_reason="stop", version=0)
            for ids in prompts
            for _ in range(n)
        ]


def rank_of(world_size, rank, all_reduce, rounds):
    """A learner with all that `roll_out` asks of it; of its prompts, those whose number is a multiple of 3 vary."""
    data = RolloutDataModule(DigitTask(), Echo(), prompts_per_iteration=4 * world_size, group_size=2, seed=2)
    trainer = SimpleNamespace(world_size=world_size, callbacks=[], progress_bar_callback=None, current_epoch=0)
    learner = SimpleNamespace(
        data=data,
        trainer=trainer,
        global_rank=rank,
        device="cpu",
        reduce=all_reduce,
        iteration=IterationState(),
        policy=SimpleNamespace(pad_token_id=0, dropout=False),
        objective=DAPO(max_resample=rounds),
    )
    trainer.lightning_module, data.trainer = learner, trainer
    data._problems["train"] = [Problem({}, [i], str(i)) for i in range(60)]
    data.reward = lambda problems, completions: (
        torch.tensor([float(c.token_ids[0] % 3 == 0 and i % 2) for i, c in enumerate(completions)]),
        {},
        0.0,
    )
    return learner


@pytest.mark.parametrize("rounds", [1, 3, 10])
def test_ranks_that_resample_different_numbers_of_groups_draw_no_prompt_twice_and_leave_none_out(rounds):
    def one(rank, all_reduce):
        learner = rank_of(2, rank, all_reduce, rounds)
        batch = roll_out(learner)
        return learner.data.engine.seen, learner.data.position, batch, learner.iteration.metrics.compute(no_all_reduce)

    (first, second) = Ranks(2).run(one)
    whole = rank_of(1, 0, no_all_reduce, 0).data
    stream = [problem.prompt_ids[0] for problem in whole.next_problems([first[1]])]
    assert first[1] == second[1] > 8
    assert sorted(first[0] + second[0]) == sorted(stream)
    assert len(first[0]) != len(second[0])
    for _, _, batch, metrics in (first, second):
        assert len(batch) == 8
        varied = batch.rewards.view(-1, 2).sum(1) > 0
        assert bool(varied.all()) or rounds < 10
        assert set(metrics) == {"rollout/zero_variance_groups", "guard/reward_errors"}
