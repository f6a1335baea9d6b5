import itertools
import random
from types import SimpleNamespace

import pytest
import torch

from lit_qrl.callbacks import AIS, RLCallback
from lit_qrl.data.module import RolloutDataModule
from lit_qrl.errors import ConfigError
from lit_qrl.loop import budget
from lit_qrl.loop.batching import deal_by_tokens, token_parts
from lit_qrl.loop.budget import TokenBudget, tokens_that_fit
from lit_qrl.rollout import TransformersEngine
from lit_qrl.types import no_all_reduce
from tests.tables import csv_rows
from tests.test_module import first_gradient
from tests.tiny_run import DigitTask, build, fit, parameters_of

GIB = 2**30


def tokens_of(part, completions, prompts, groups):
    return sum(completions[row] for row in part) + sum({groups[row]: prompts[row] for row in part}.values())


@pytest.mark.parametrize("seed", range(12))
def test_rows_are_packed_by_tokens_with_a_prompt_once(seed):
    draw = random.Random(seed)
    groups = [group for group in range(draw.randint(2, 4)) for _ in range(3)]
    prompts = [5 + 7 * group for group in groups]
    completions = [draw.randint(1, 30) for _ in groups]
    capacity = draw.randint(40, 120)
    for parts in (
        token_parts(completions, prompts, groups, capacity),
        deal_by_tokens(completions, prompts, groups, draw.randint(1, len(groups))),
    ):
        assert all(parts)
        assert sorted(itertools.chain(*parts)) == list(range(len(groups)))
    parts = token_parts(completions, prompts, groups, capacity)
    sizes = [tokens_of(part, completions, prompts, groups) for part in parts]
    assert all(size <= capacity or len(part) == 1 for size, part in zip(sizes, parts, strict=True))
    whole = sum(completions) + sum(dict(zip(groups, prompts, strict=True)).values())
    assert token_parts(completions, prompts, groups, whole) == [list(range(len(groups)))]


def test_balanced_micro_batches_are_near_the_best_that_there_are():
    """Of all ways to share four groups between two, none has a largest one of less than three quarters of ours."""
    for seed in range(8):
        draw = random.Random(seed)
        groups = [group for group in range(4) for _ in range(2)]
        prompts = [4 + 3 * group for group in groups]
        completions = [draw.randint(1, 20) for _ in groups]
        sizes = (completions, prompts, groups)
        ours = deal_by_tokens(*sizes, 2)
        assert len(ours) == 2
        best = min(
            max(tokens_of([row for row in range(8) if side[row] == half], *sizes) for half in (0, 1))
            for side in itertools.product((0, 1), repeat=8)
        )
        assert best >= 0.75 * max(tokens_of(part, *sizes) for part in ours)


def test_tokens_follow_from_what_one_pass_took():
    assert tokens_that_fit(8192, peak=20 * GIB, free=60 * GIB, total=140 * GIB) == 16384  # 53 of 20 GiB: 2.65 times
    assert tokens_that_fit(8192, peak=20 * GIB, free=90 * GIB, total=140 * GIB) == 32768
    assert tokens_that_fit(8192, peak=1, free=90 * GIB, total=140 * GIB) == 32768  # the largest
    assert tokens_that_fit(8192, peak=80 * GIB, free=20 * GIB, total=140 * GIB) == 8192  # the least
    assert tokens_that_fit(8192, peak=80 * GIB, free=0, total=140 * GIB) == 8192


class Parts(RLCallback):
    """Remembers the tokens of every micro-batch, and the steps and evaluations between."""

    def __init__(self):
        self.parts, self.steps, self.evaluations = [], [], 0

    def on_rollout_end(self, trainer, module, batch):
        self.parts.append([])

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        one = batch.batch
        self.parts[-1].append(
            tokens_of(
                range(len(one)),
                (one.total_length - one.prompt_length).tolist(),
                one.prompt_length.tolist(),
                one.group.tolist(),
            )
        )

    def on_train_epoch_end(self, trainer, pl_module):
        self.steps.append(trainer.global_step)

    def on_validation_start(self, trainer, pl_module):
        self.evaluations += not trainer.sanity_checking


def test_a_run_takes_as_many_micro_batches_as_its_tokens_need(tmp_path, recwarn):
    seen, data = Parts(), {"micro_batches": "auto", "max_tokens_per_micro_batch": 40, "mini_batches": 2, "passes": 2}
    limits = {"max_epochs": 3, "limit_val_batches": 1}
    trainer, _, _ = fit(tmp_path, callbacks=[seen], data=data, trainer=limits)
    assert all(tokens <= 40 for parts in seen.parts for tokens in parts)
    assert all(len(parts) % 4 == 0 and len(parts) > 4 for parts in seen.parts)
    assert not [str(one.message) for one in recwarn if "samples have been fetched" in str(one.message)]
    assert seen.steps == [4, 8, 12]  # optimizer steps: two passes of two mini-batches
    assert seen.evaluations == 3 + 1  # one before the first iteration
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 12
    rows = [row for row in csv_rows(tmp_path / "run" / "metrics.csv") if row["update/micro_batches"]]
    assert [4 * float(row["update/micro_batches"]) for row in rows] == [len(parts) for parts in seen.parts]


def test_the_gradient_is_that_of_one_micro_batch(tmp_path):
    given = ({}, {"micro_batches": "auto"}, {"micro_batches": "auto", "max_tokens_per_micro_batch": 40})
    gradients = [first_gradient(tmp_path / str(k), data=data, callbacks=[AIS()]) for k, data in enumerate(given)]
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=0, atol=1e-5 * float(gradients[0].abs().max()))


def test_a_resumed_run_cuts_as_the_one_before_and_ends_with_the_same_bits(tmp_path):
    def trained(folder, epochs, ckpt_path=None):
        data = {"micro_batches": "auto"}
        trainer, module, module_data = build(folder, data=data, trainer={"max_epochs": epochs})
        if ckpt_path is None:
            module_data.budget.chosen = 40  # as a GPU's memory would have it
        trainer.fit(module, datamodule=module_data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
        return parameters_of(module), module_data.budget.chosen

    whole, _ = trained(tmp_path / "whole", 3)
    trained(tmp_path / "cut", 2)
    resumed, chosen = trained(tmp_path / "cut", 3, str(tmp_path / "cut" / "run" / "checkpoints" / "last.ckpt"))
    assert chosen == 40
    assert torch.equal(resumed, whole)


def learner_on(device, monkeypatch, flat=True):
    """Return a learner of one parameter, and the loop that is told."""
    monkeypatch.setattr(budget, "is_padding_free", lambda network: flat)
    parameter = torch.nn.Parameter(torch.zeros(GIB // 2**20))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace()))
    return SimpleNamespace(
        device=torch.device(device),
        policy=SimpleNamespace(network=None, parameters=lambda: [parameter]),
        reduce=no_all_reduce,
        iteration=SimpleNamespace(metrics=SimpleNamespace(value=lambda name, value: None)),
        trainer=SimpleNamespace(
            fit_loop=loop, val_check_interval=1.0, val_check_batch=1, accumulate_grad_batches=1, num_training_batches=1
        ),
    )


def test_the_first_iteration_of_a_gpu_chooses_at_its_end_by_what_its_passes_took(monkeypatch):
    allocated = {"now": 10 * GIB, "peak": 10 * GIB}
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: allocated["peak"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=140 * GIB))
    monkeypatch.setattr(budget, "free_memory", lambda device: 60 * GIB)
    monkeypatch.setattr(budget, "widest", lambda width, reduce, device: width)
    learner = learner_on("cuda", monkeypatch)
    batch = SimpleNamespace(
        total_length=torch.tensor([6000, 4000]), prompt_length=torch.tensor([2000, 2000]), group=torch.tensor([0, 0])
    )
    steps = [(batch, torch.tensor([0, 1]))]
    one = TokenBudget(None)
    one.begin(learner, steps)
    assert (one.tokens, one.parts, learner.trainer.accumulate_grad_batches) == (8192, 1, 1)
    one.pass_begins(learner, batch, 0)
    assert not learner.policy.holds_logits  # what could do without is not measured
    allocated["peak"] = 30 * GIB
    one.pass_ends(learner)
    assert one.chosen is None
    one.end(learner)
    assert one.chosen == 16384  # 8000 tokens took 20 GiB, 53 are free: 21,000
    allocated["peak"] = 90 * GIB
    one.pass_begins(learner, batch, 0)
    one.pass_ends(learner)
    one.end(learner)
    assert one.chosen == 16384  # once for the run
    assert learner.policy.holds_logits


def test_lightnings_loop_is_told_what_an_iteration_holds(monkeypatch):
    learner = learner_on("cpu", monkeypatch, flat=False)
    batch = SimpleNamespace(
        total_length=torch.tensor([6000, 4000, 4000]), prompt_length=torch.tensor([2000] * 3), group=torch.arange(3)
    )
    one = TokenBudget(None)
    one.begin(learner, [(batch, torch.tensor([0, 1, 2])), (batch, torch.tensor([1, 2]))])
    trainer = learner.trainer
    assert one.parts == 2  # 6000, and two rows of 4000 padded tokens
    assert (trainer.fit_loop.max_batches, trainer.val_check_batch) == (4, 4)
    assert trainer.accumulate_grad_batches == 2
    one.pass_begins(learner, batch, 0)  # on a CPU nothing is measured
    one.pass_ends(learner)
    one.end(learner)
    assert one.chosen is None


def test_memory_says_nothing_where_runs_must_repeat_bit_for_bit(monkeypatch):
    assert TokenBudget(None).measures(torch.device("cuda"))
    assert not TokenBudget(4096).measures(torch.device("cuda"))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not TokenBudget(None).measures(torch.device("cuda"))


def test_a_word_that_is_no_number_and_a_sequence_beyond_the_limit(tmp_path):
    with pytest.raises(ConfigError, match=r"no number.*auto.*Given: all"):
        RolloutDataModule(DigitTask(), TransformersEngine(), micro_batches="all")
    with pytest.raises(ConfigError, match=r"1 sequence × 24 tokens.*One sequence alone"):
        fit(tmp_path, data={"micro_batches": "auto", "max_tokens_per_micro_batch": 20})
