"""A run of two processes is the run of one: completions, gradients, weights, metrics, evaluations, resumed or not."""

import os
import signal
import traceback
from functools import partial
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from peft import LoraConfig
from torch.distributed.fsdp import CPUOffloadPolicy

from lit_qrl.callbacks import AIS, GeometricRejection, RLCallback, TruncatedIS
from lit_qrl.errors import ConfigError
from lit_qrl.formats import Int4Group
from lit_qrl.network.shards import whole
from lit_qrl.objective import DAPO, GRPO, GSPO
from lit_qrl.optim import MuonAdamW
from lit_qrl.precision import NVFP4LoRA, QATAligned, UnifiedFP8
from lit_qrl.seeding import derive_seed
from lit_qrl.strategies import ShardedStrategy, sharded
from tests.tiny_run import DigitReward, DigitTask, build, model_folder
from tests.two_processes import RANKS, free_ports, in_two, join, started

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
"""What fp32 sums in another order may differ by."""
CLOCKS = ("time/", "rollout/tokens_per", "publish/gigabytes")
ITERATIONS = 5
PARTS = partial(ShardedStrategy, "fp32")
WRITTEN_IN_PARTS = partial(ShardedStrategy, "fp32", distributed_checkpoints=True)


class Few(DigitReward):
    """The same score within every third group, and one completion of another without any."""

    def __call__(self, samples):
        numbers = [int(sample.prompt.split(",")[0]) for sample in samples]
        scores = [0.5 if n % 3 == 0 else score for n, score in zip(numbers, super().__call__(samples), strict=True)]
        return [
            None if n == 4 and s.completion[:1].isdigit() else x
            for n, s, x in zip(numbers, samples, scores, strict=True)
        ]


class Disturbed(RLCallback):
    """Makes a sampler that is not the learner: noise on its norms, of each iteration's own."""

    def on_publish(self, trainer, module, name, tensor):
        if tensor.ndim != 1 or not tensor.numel():  # nothing stands for a weight that is packed
            return tensor
        generator = torch.Generator().manual_seed(derive_seed(name, trainer.current_epoch))
        return tensor * (1 + 0.1 * torch.randn(tensor.shape, generator=generator)).to(tensor)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters):
    # Where a gradient is smaller than eps its rounding is not blown up to a whole step.
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3)


FIRST = "AIS and a rejection, passes and mini-batches"
RUNS = {
    FIRST: lambda: {
        "callbacks": [Disturbed(), AIS(), GeometricRejection(lower=0.8, upper=1.25)],
        "objective": GRPO(reduction="token", kl_coefficient=0.01),
        "data": {"passes": 2, "mini_batches": 2, "micro_batches": 2},
        "trainer": {"limit_val_batches": 1.0, "gradient_clip_val": 0.5},
        "optimizer": adamw,
    },
    "GSPO with TIS": lambda: {
        "callbacks": [Disturbed(), TruncatedIS(upper=1.05)],
        "objective": GSPO(),
        "data": {"mini_batches": 4},
    },
    "dynamic sampling, and rewards that are not given": lambda: {
        "callbacks": [Disturbed(), TruncatedIS(level="sequence", upper="auto")],
        "objective": DAPO(max_resample=2, overlong_penalty=None),
        "data": {"micro_batches": 2},
        "task": DigitTask(reward=Few()),
    },
}


ADAPTED = {"lora": LoraConfig(r=4, target_modules="all-linear"), "gradient_checkpointing": True}


def low_bit(plugin, **options):
    """A run whose learner computes in the plugin's arithmetic."""
    options = {"data": {"mini_batches": 2}, "trainer": {"plugins": [plugin]}, "format": "auto", **options}
    return {"callbacks": [Disturbed(), TruncatedIS()], **options}


class Offloaded(ShardedStrategy):
    """Parts that wait on the host, of a learner that computes there too, which the strategy refuses as of no use."""

    def __init__(self):
        super().__init__("fp32", offload=True)
        self._process_group_backend = "gloo"

    def check(self, module):
        pass

    def shard(self, policy):
        with mock.patch.object(sharded, "CPUOffloadPolicy", partial(CPUOffloadPolicy, pin_memory=False)):
            super().shard(policy)


def by_tokens(name, most=28):
    """A run whose micro-batches hold so many tokens, of which processes have different ones."""
    options = RUNS[name]()
    return {**options, "data": {**options["data"], "micro_batches": "auto", "max_tokens_per_micro_batch": most}}


SHARDED = {
    "full weights in parts": partial(by_tokens, FIRST),
    "offloaded weights in parts": RUNS[FIRST],
    "adapter in parts": lambda: {**RUNS["GSPO with TIS"](), "policy": ADAPTED},
    "aligned in parts": lambda: low_bit(
        QATAligned(Int4Group(32)), policy={"gradient_checkpointing": True}, objective=GRPO(kl_coefficient=0.01)
    ),
    "Muon in parts": lambda: {**RUNS["GSPO with TIS"](), "optimizer": lambda named: MuonAdamW(named, lr=2e-5)},
    "packed base in parts": lambda: low_bit(NVFP4LoRA(), policy=ADAPTED),
    "replicated base under parts": lambda: low_bit(NVFP4LoRA(), policy=ADAPTED),
}
SLOW = ("adapter in parts", "replicated base under parts")
RESUMED = {"resumed": lambda: "ddp", "resumed from parts": WRITTEN_IN_PARTS, "resumed in parts": PARTS}
"""Runs that go on with other numbers of processes, of which the last takes longer."""


def few(name):
    """Iterations of a run in parts: where a code turns over, since a weight's last bit is another, draws part ways."""
    return {"aligned in parts": 1, "adapter in parts": ITERATIONS}.get(name, 2)


class Watch(Callback):
    def __init__(self):
        self.gradients, self.rows, self.tokens, self.prompts, self.evaluated = [], [], [], [], {}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if pl_module.iteration.rollout is not None and len(self.gradients) < 2:
            found = {name: p.grad for name, p in pl_module.named_parameters() if p.grad is not None}
            self.gradients.append({name: whole(gradient).clone() for name, gradient in found.items()})

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0:
            rollout, iteration = pl_module.iteration.rollout, pl_module.iteration
            width = rollout.mask.shape[1]
            rows = [ids[-width:][mask].tolist() for ids, mask in zip(rollout.tokens, rollout.mask, strict=True)]
            self.tokens.append(rows)
            self.prompts.append([problem.row["question"] for problem in iteration.problems])

    def on_validation_end(self, trainer, pl_module):
        found = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        self.evaluated[trainer.global_step] = found

    def on_train_epoch_start(self, trainer, pl_module):
        """The row of the iteration before: a module's hooks come after those of callbacks."""
        row = {name: float(v) for name, v in trainer.logged_metrics.items() if not name.startswith(CLOCKS)}
        if "reward/mean" in row:
            self.rows.append(row)

    def on_train_end(self, trainer, pl_module):
        self.on_train_epoch_start(trainer, pl_module)


def learn(folder, ranks, epochs=ITERATIONS, ckpt_path=None, strategy=lambda: "ddp", options=dict, **place):
    options = options()
    watch = Watch()
    trainer = {"max_epochs": epochs, "devices": ranks, "strategy": strategy() if ranks > 1 else "auto", **place}
    data = {"prompts_per_iteration": 8, **options.pop("data", {})}
    options |= {"data": data, "trainer": {**options.get("trainer", {}), **trainer}}
    options = {"format": "fp32", "optimizer": sgd, **options, "callbacks": [watch, *options.get("callbacks", [])]}
    run, module, _ = build(folder, **options)
    run.fit(module, datamodule=run.datamodule or _, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    weights = {name: whole(p.detach()).clone() for name, p in module.named_parameters()}
    seen = {name: getattr(watch, name) for name in ("gradients", "rows", "tokens", "prompts", "evaluated")}
    return {**seen, "weights": weights, "own": run.datamodule.slots.own}


def resumed(rank, ports, folder, strategy):
    """Two processes, then one, then two; each learns two iterations more."""
    options = RUNS[FIRST]
    last = folder / "run" / "checkpoints" / "last.ckpt"
    learn(folder, RANKS, 2, strategy=strategy, options=options)
    torch.distributed.destroy_process_group()  # which outlives a Trainer
    if rank == 0:
        learn(folder, 1, 4, ckpt_path=last, options=options)
    join(rank, ports)
    return learn(folder, RANKS, 6, ckpt_path=last, strategy=strategy, options=options)


def refused(rank, ports, folder):
    """What a run says whose processes have different groups, and one with more processes than groups."""
    said = []
    for data in ({"group_size": 4 + rank}, {"mini_batches": 8}):
        join(rank, ports)
        with pytest.raises(ConfigError) as caught:
            learn(folder / "refused", RANKS, 1, options=lambda data=data: {"data": data})
        said.append(str(caught.value))
    return said


def parted(rank, ports, folder, slow=False):
    """Return the steps of learners in parts, and of runs that go on."""
    steps = {}
    for name in (name for name in SHARDED if (name in SLOW) == slow):
        parts = partial(ShardedStrategy, "fp32", packed_base="sharded" if name.startswith("packed") else "replicated")
        parts = Offloaded if name.startswith("offloaded") else parts
        steps[name] = partial(learn, folder / name.split()[0], RANKS, few(name), strategy=parts, options=SHARDED[name])
    for name, strategy in RESUMED.items():
        if (name == "resumed in parts") == slow:
            steps[name] = partial(resumed, rank, ports, folder / name, strategy)
    return steps


def quick(rank, ports, folder):
    """What two processes do in one start, since that takes longest."""
    steps = {name: partial(learn, folder / name.split()[0], RANKS, options=made) for name, made in RUNS.items()}
    steps |= parted(rank, ports, folder)
    for name, strategy in (("unified", PARTS), ("unified, whole", lambda: "ddp")):
        unified = partial(low_bit, UnifiedFP8(), data={"micro_batches": 2})
        steps[name] = partial(learn, folder / "unified", RANKS, 2, strategy=strategy, options=unified)
    steps["refused"] = partial(refused, rank, ports, folder)
    return taken(steps, rank, ports)


def thorough(rank, ports, folder):
    """What takes longer."""
    return taken(parted(rank, ports, folder, slow=True), rank, ports)


def taken(steps, rank, ports):
    found = {}
    for name, step in steps.items():
        join(rank, ports)
        try:
            found[name] = step()
        except Exception:
            found[name] = traceback.format_exc()
    return found


def with_models(folder):
    for name in (*(name.split()[0] for name in (*RUNS, *SHARDED)), "unified", "refused", *RESUMED):
        model_folder(folder / name / "model")
    return folder


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return in_two(quick, with_models(tmp_path_factory.mktemp("ranks")))


@pytest.fixture(scope="module")
def slow_ranks(tmp_path_factory):
    return in_two(thorough, with_models(tmp_path_factory.mktemp("ranks")))


def marked(names, slow):
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in names]


def made(rank, name):
    """What a process returned from a step; its traceback if it failed."""
    if isinstance(rank[name], str):
        pytest.fail(rank[name])
    return rank[name]


def assert_close(found, wanted, what):
    assert found.keys() == wanted.keys(), what
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, **CLOSE, msg=lambda text, name=name: f"{what} {name}: {text}")


def drawn_alike(ranks, alone, iterations=None):
    """Assert that each process drew its groups as the one alone did."""
    for i, prompts in enumerate(alone["prompts"][:iterations]):
        for part in ranks:
            assert part["prompts"][i] == [prompts[slot] for slot in part["own"]]
            group = len(alone["tokens"][i]) // len(prompts)
            rows = [row for slot in part["own"] for row in range(slot * group, slot * group + group)]
            assert part["tokens"][i] == [alone["tokens"][i][row] for row in rows], f"iteration {i}"


def assert_same(ranks, alone):
    """The ranks hold what one process holds: each its own groups, and everything else alike."""
    drawn_alike(ranks, alone)
    assert sorted(ranks[0]["own"] + ranks[1]["own"]) == list(range(len(alone["own"])))
    for part in ranks:
        assert len(part["rows"]) == len(alone["rows"])
        for i, row in enumerate(alone["rows"]):
            assert_close(part["rows"][i], row, f"metrics of iteration {i}:")
        for i, gradient in enumerate(alone["gradients"]):
            assert_close(part["gradients"][i], gradient, f"gradient {i} of")
        assert_close(part["weights"], alone["weights"], "weights of")
        assert part["evaluated"] == alone["evaluated"]


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_repeat_the_run_of_one(name, ranks, tmp_path):
    alone = learn(tmp_path, 1, options=RUNS[name])
    assert len(alone["rows"]) == ITERATIONS
    assert all(any(g.abs().max() > 0 for g in gradient.values()) for gradient in alone["gradients"])
    assert_same([made(rank, name) for rank in ranks], alone)
    if name.startswith("dynamic"):
        assert sum(row["rollout/zero_variance_groups"] > 0 for row in alone["rows"]) > 1
        assert any(row["reward/unscored"] > 0 for row in alone["rows"])
    if name == FIRST:
        assert alone["evaluated"]
        assert any(row["correction/rejected_sequences"] > 0 for row in alone["rows"])


@pytest.mark.parametrize("name", marked(SHARDED, SLOW))
def test_a_learner_in_parts_repeats_the_run_of_a_whole_one(name, request, tmp_path):
    ranks = request.getfixturevalue("slow_ranks" if name in SLOW else "ranks")
    model_folder(tmp_path / "model")  # a network that is made draws what an adapter would
    alone, parts = learn(tmp_path, 1, few(name), options=SHARDED[name]), [made(rank, name) for rank in ranks]
    own = ("publish/probe", "update/micro_batches")  # a learner in parts is not scored against its sampler
    for run in (alone, *parts):
        run["rows"] = [{k: v for k, v in row.items() if not k.startswith(own)} for row in run["rows"]]
    assert_same(parts, alone)


def test_unified_fp8_in_parts_repeats_the_run_of_whole_learners(ranks):
    # One process's gradients are others: a block of 128 tokens that share a scale holds rows of both.
    for rank in ranks:
        parts, whole_ones = made(rank, "unified"), made(rank, "unified, whole")
        assert parts["tokens"] == whole_ones["tokens"]
        for found, wanted in zip(parts["gradients"], whole_ones["gradients"], strict=True):
            assert_close(found, wanted, "gradient of")
        assert_close(parts["weights"], whole_ones["weights"], "weights of")


def test_processes_that_cannot_share_a_run_are_all_told(ranks):
    assert ranks[0]["refused"] == ranks[1]["refused"]
    different, too_many = made(ranks[0], "refused")
    assert "started with different settings" in different
    assert "group_size 4 on rank 0 and 5 on rank 1" in different
    assert "multiple of 2 ranks × 8 mini-batches" in too_many


class Killed(Callback):
    """Ends the second process in the third iteration, as the system does."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == 2 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def loses_one(rank, ports, folder):
    with (folder / f"{rank}.txt").open("w") as said:
        os.dup2(said.fileno(), 2)
        join(rank, iter(ports))
        learn(folder, RANKS, 5, options=lambda: {"callbacks": [Killed()]})


@pytest.mark.slow
def test_when_a_process_is_killed_the_other_ends_and_the_run_goes_on(tmp_path):
    model_folder(tmp_path / "model")
    processes = started(loses_one, free_ports(1), tmp_path)
    processes[1].join()
    processes[0].join(60)
    assert [process.exitcode for process in processes] == [75, -signal.SIGKILL]
    said = " ".join((tmp_path / "0.txt").read_text().split())
    assert said.count("lit-qrl: Rank 1 of 2 ended without a word, as a process does that is killed") == 1
    assert "Traceback" not in said
    assert learn(tmp_path, 1, 5, ckpt_path=tmp_path / "run" / "checkpoints" / "last.ckpt")["rows"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return learn(tmp_path_factory.mktemp("unbroken"), 1, 6, options=RUNS[FIRST])


@pytest.mark.parametrize("name", marked(RESUMED, ["resumed in parts"]))
def test_a_run_goes_on_with_another_number_of_processes(name, request, unbroken):
    for rank in request.getfixturevalue("slow_ranks" if name == "resumed in parts" else "ranks"):
        last = made(rank, name)
        assert_close(last["weights"], unbroken["weights"], "weights of")
        for found, wanted in zip(last["rows"], unbroken["rows"][4:], strict=True):
            # A run probes its sampler when it starts, and so again where it goes on.
            found, wanted = (
                {name: value for name, value in row.items() if not name.startswith(("publish/probe", "val/"))}
                for row in (found, wanted)
            )
            assert_close(found, wanted, "metrics:")
