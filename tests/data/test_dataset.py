from types import SimpleNamespace

import pytest
import torch

from lit_qrl.callbacks import RLCallback
from lit_qrl.data.dataset import RolloutDataset, concatenate
from lit_qrl.objective import DAPO, GRPO
from tests.networks import batch_of
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
    _, _, module_data = fit(tmp_path, callbacks=[seen], data=data)
    dataset = RolloutDataset(module_data)
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


def part(prompts, completions, version):
    batch = batch_of(prompts, completions)
    b, t = batch.mask.shape
    batch.sampler_logprobs = -torch.arange(1.0, b * t + 1).view(b, t) * batch.mask
    batch.rewards = torch.arange(float(b)) + 10 * version
    batch.version = torch.full((b,), version)
    batch.reward_parts = {"digits": batch.rewards / 2}
    return batch


def rows_of(batch):
    """Every sequence as (prompt, completion, log-probs), read by its own lengths."""
    s, t = batch.tokens.shape[1], batch.mask.shape[1]
    for i in range(len(batch)):
        n, p = int(batch.mask[i].sum()), int(batch.prompt_length[i])
        yield (
            batch.tokens[i, s - t - p : s - t].tolist(),
            batch.tokens[i, s - t : s - t + n].tolist(),
            batch.sampler_logprobs[i, :n].tolist(),
        )


def test_batches_of_other_widths_are_joined_row_by_row():
    first = part([[5, 6, 7], [8]], [[9, 2], [3]], 1)
    second = part([[4], [4]], [[2, 3, 4, 5], [6]], 2)
    joined = concatenate([first, second], 0, 2)
    assert list(rows_of(joined)) == [*rows_of(first), *rows_of(second)]
    assert joined.tokens.shape == (4, 3 + 4)
    assert joined.rewards.tolist() == [10, 11, 20, 21]
    assert joined.reward_parts["digits"].tolist() == [5, 5.5, 10, 10.5]
    assert joined.version.tolist() == [1, 1, 2, 2]
    assert joined.group.tolist() == [0, 0, 1, 1]
    outside = joined.sampler_logprobs[~joined.mask]
    assert not outside.any()


def test_a_single_batch_is_left_as_it_is():
    only = part([[5, 6]], [[7]], 1)
    assert concatenate([only], 0, 1) is only


@pytest.mark.parametrize(
    ("updates", "old_logprobs", "corrected", "carries", "needed"),
    [
        ((1, 1), "decoupled", False, False, False),
        ((2, 1), "decoupled", False, False, True),
        ((1, 4), "decoupled", False, False, True),
        ((1, 4), "bypass", False, False, False),
        ((1, 1), "decoupled", True, False, True),
        ((1, 1), "decoupled", False, True, True),
    ],
)
def test_learner_old_is_scored_only_where_something_looks_at_it(updates, old_logprobs, corrected, carries, needed):
    data = SimpleNamespace(passes=updates[0], mini_batches=updates[1])
    objective = SimpleNamespace(old_logprobs=old_logprobs, carries_ratio=carries)
    assert RolloutDataset(data)._needs_old(SimpleNamespace(objective=objective, corrected=corrected)) is needed
