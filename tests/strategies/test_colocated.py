"""Who has the device when: the order of events on a CPU, with an engine that only says that it sleeps."""

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from peft import LoraConfig

from lit_qrl.callbacks import RLCallback
from lit_qrl.errors import ConfigError
from lit_qrl.precision import NVFP4LoRA
from lit_qrl.strategies import ColocatedStrategy
from tests.tiny_run import TellingEngine, build, parameters_of


class SleepyEngine(TellingEngine):
    """Forgets its weights in a sleep of level 2."""

    def __init__(self, sleep_level=1):
        super().__init__()
        self.sleep_level, self.asleep, self.complete = sleep_level, False, True

    @property
    def holds_weights(self):
        return self.complete

    def asked(self, name):
        if name not in ("setup", "close"):
            assert not self.asleep, f"{name} of a sleeping engine"
            self.complete |= name == "load_weights"
            assert self.complete
            super().asked(name)

    def sleep(self):
        self.story.append("sleep")
        self.asleep, self.complete = True, self.sleep_level < 2

    def wake(self):
        if self.asleep:
            self.story.append("wake")
            self.asleep = False


class Story(RLCallback, Callback):
    """Adds the learner's side to the engine's story."""

    def __init__(self, engine):
        self.engine = engine

    def on_rollout_end(self, trainer, module, batch):
        self.engine.story.append("scored")

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        assert not trainer.strategy.offloaded.away
        self.engine.story.append("update")

    def on_train_epoch_end(self, trainer, pl_module):
        self.engine.story.append("end")


def colocated(folder, level=1, offload=False, story=True, strategy=True, **options):
    """Return (trainer, module, engine) after a run."""
    engine = SleepyEngine(level)
    trainer_options = {"max_epochs": 2, **options.pop("trainer", {})}
    if strategy:
        trainer_options["strategy"] = ColocatedStrategy(offload_optimizer=offload)
    trainer, module, data = build(
        folder,
        callbacks=[*([Story(engine)] if story else []), *options.pop("callbacks", ())],
        trainer=trainer_options,
        publisher={"probe_every": 0, **options.pop("publisher", {})},
        **options,
    )
    data.engine = engine
    trainer.fit(module, datamodule=data)
    return trainer, module, engine


ITERATION = ["load_weights", "generate", "sleep", "scored", "update", "end"]


@pytest.mark.parametrize("level", [1, 2])
def test_the_engine_sleeps_exactly_once_per_iteration_while_the_learner_works(tmp_path, level):
    _, _, engine = colocated(tmp_path, level, trainer={"max_epochs": 3})
    assert engine.story == [*ITERATION, "wake", *ITERATION, "wake", *ITERATION]


def test_rollouts_drawn_again_need_one_sleep(tmp_path):
    from lit_qrl.objective import DAPO

    _, _, engine = colocated(
        tmp_path, objective=DAPO(filter_zero_variance=True, max_resample=2), data={"group_size": 2}
    )
    assert engine.story.count("generate") > 2
    assert engine.story.count("sleep") == 2


def test_an_evaluation_is_a_phase_of_its_own_and_several_updates_need_one_sleep(tmp_path):
    _, _, engine = colocated(tmp_path, data={"passes": 2}, trainer={"limit_val_batches": 1, "max_epochs": 1})
    evaluation = ["load_weights", "generate", "generate", "sleep"]
    assert engine.story == [*evaluation, "wake", *ITERATION[:-1], "update", "wake", *evaluation, "end"]


@pytest.mark.parametrize("level", [1, 2])
def test_an_adapters_base_goes_out_again_where_the_sleep_dropped_it(tmp_path, level):
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    options = {"format": "auto", "policy": {"lora": lora}, "trainer": {"plugins": [NVFP4LoRA()], "max_epochs": 3}}
    _, _, engine = colocated(tmp_path, level, **options)
    first = ["load_weights", "load_adapter"]
    assert engine.loads == (first * 3 if level == 2 else [*first, "load_adapter", "load_adapter"])


def test_a_kept_sampler_wakes_without_a_publish(tmp_path):
    _, _, engine = colocated(tmp_path, publisher={"every_n_iterations": 2})
    assert engine.story == [*ITERATION, "wake", *ITERATION[1:]]


def test_optimizer_state_is_away_while_completions_are_drawn_and_the_run_is_the_same(tmp_path):
    seen = []

    class Where(RLCallback):
        def on_generation_end(self, trainer, module):
            if trainer.strategy.offload_optimizer:
                seen.append((trainer.strategy.offloaded.away, all(p.grad is None for p in module.parameters())))

    ends = []
    for offload in (True, False):
        options = {"offload": offload, "callbacks": [Where()], "trainer": {"max_epochs": 3}}
        _, module, _ = colocated(tmp_path / str(offload), story=False, **options)
        ends.append(parameters_of(module))
    assert torch.equal(*ends)
    # no state before the first step, and every gradient is gone
    assert seen == [(False, True), (True, True), (True, True)]


def test_a_checkpoint_holds_the_state_and_resumes_elsewhere(tmp_path):
    _, module, _ = colocated(tmp_path / "a", offload=True, trainer={"max_epochs": 4})
    colocated(tmp_path / "b", offload=True)
    trainer, resumed, data = build(tmp_path / "b", trainer={"max_epochs": 4}, publisher={"probe_every": 0})
    path = tmp_path / "b" / "run" / "checkpoints" / "last.ckpt"
    trainer.fit(resumed, datamodule=data, ckpt_path=path, weights_only=True)
    assert torch.equal(parameters_of(resumed), parameters_of(module))


def test_it_is_for_one_device():
    with pytest.raises(ConfigError, match=r"shares one device.*devices: 1\. Given: 2"):
        Trainer(accelerator="cpu", devices=2, strategy=ColocatedStrategy(True), logger=False)


def test_what_would_change_nothing_or_lose_the_weights_is_refused(tmp_path):
    cases = [
        ({"level": 0}, "nothing to do"),
        ({"level": 1, "strategy": False}, r"never sleep.*vllm_colocated\.yaml"),
        ({"level": 2, "publisher": {"every_n_iterations": 2}}, r"level 2 drops the weights.*sleep_level to 1"),
    ]
    for number, (options, message) in enumerate(cases):
        with pytest.raises(ConfigError, match=message):
            colocated(tmp_path / str(number), story=False, **options)


@pytest.mark.gpu
def test_optimizer_state_leaves_the_gpu():
    from lit_qrl.strategies.colocated import OffloadedState

    parameter = torch.nn.Parameter(torch.randn(2**20, 16, device="cuda"))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    parameter.grad = None
    torch.cuda.empty_cache()
    before, state = torch.cuda.memory_allocated(), [v.clone().cpu() for v in optimizer.state[parameter].values()]
    offloaded = OffloadedState()
    offloaded.to_host([optimizer])
    assert before - torch.cuda.memory_allocated() == 2 * parameter.numel() * 4
    assert all(v.is_pinned() for v in optimizer.state[parameter].values() if v.numel() > 1)
    offloaded.to_device([optimizer])
    assert all(torch.equal(a, b.cpu()) for a, b in zip(state, optimizer.state[parameter].values(), strict=True))
