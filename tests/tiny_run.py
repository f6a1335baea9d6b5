"""A whole run at the smallest scale: a random network, a toy task, the real Trainer."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import nn

from lit_qrl.callbacks import Guard, MismatchMonitor, Report, RLCallback, RLProgress, RunCheckpoint, WeightPublisher
from lit_qrl.data.module import RolloutDataModule
from lit_qrl.data.task import Task
from lit_qrl.module import GRPOModule
from lit_qrl.objective import GRPO
from lit_qrl.policy import CausalPolicy
from lit_qrl.rewards.base import Reward
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.run.loggers import RunCSVLogger
from tests.networks import build_network, build_tokenizer


class DigitReward(Reward):
    """Share of digits in the completion: easy to learn, different within a group."""

    name = "digits"

    def __call__(self, samples):
        return [sum(c.isdigit() for c in s.completion) / max(len(s.completion), 1) for s in samples]


class DigitTask(Task):
    name = "digits"

    def __init__(self, rows=24, reward=None):
        self.rows = [{"question": f"{i},{i * 7 % 90}:"} for i in range(rows)]
        self.rewards = [reward or DigitReward()]

    def train_rows(self):
        return self.rows[:-8]

    def evaluation_rows(self):
        return self.rows[-8:]

    def prompt(self, row):
        return row["question"]

    def reference(self, row):
        return None

    def is_correct(self, samples):
        return [sample.completion[:1].isdigit() for sample in samples]


def model_folder(folder: Path, network=build_network, **changes) -> str:
    """Write a random network and its tokenizer; the same seed gives the same weights."""
    if not (folder / "config.json").exists():
        network(**{"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, **changes}).save_pretrained(folder)
        build_tokenizer(pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return str(folder)


@contextmanager
def without_plots():
    """Make reports whose plots, which have tests of their own and take seconds to draw, are left out."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("draw", "draw_histograms"):
            patch.setattr(f"lit_qrl.report.single.{name}", lambda *args: b"PNG")
        yield


def on_sums(folder: Path, model: str, epochs: int = 1) -> dict:
    """The keys of a `lit-qrl fit` on rows of sums that it writes into `folder`, where the run is `folder / "run"`."""
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model.policy": "CausalPolicy",
        "model.policy.model": model,
        "data.task": "DatasetTask",
        "data.task.path": str(folder / "rows.jsonl"),
        "data.task.chat": False,
        "data.task.evaluation_size": 4,
        "data.engine": "TransformersEngine",
        "data.prompts_per_iteration": 4,
        "data.group_size": 4,
        "data.max_prompt_tokens": 8,
        "data.max_completion_tokens": 4,
        "trainer.accelerator": "cpu",
        "trainer.max_epochs": epochs,
        "trainer.limit_val_batches": 0,
        "trainer.enable_progress_bar": False,
        "trainer.default_root_dir": str(folder / "run"),
    }


def as_words(options: dict) -> list[str]:
    """The same on the command line."""
    pairs = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in options.items())
    return [part for key, value in pairs for part in (f"--{key}", value)]


LEARNED = {
    "model.optimizer": "torch.optim.AdamW",
    "model.objective": "GRPO",
    "data.task.rewards": [{"class_path": "tests.tiny_run.DigitReward"}],
}
"""What makes it a run that learns something."""


def command(folder: Path, model: str, *args: str, lr: float = 0.01, epochs: int = 2) -> list[str]:
    """The arguments of a `lit-qrl fit` on sums for whose digits there is a reward."""
    return ["fit", *as_words({**on_sums(folder, model, epochs), **LEARNED, "model.optimizer.lr": lr}), *args]


def build(
    folder: Path,
    callbacks=(),
    objective=None,
    data=None,
    trainer=None,
    format="fp8_row",
    policy=None,
    publisher=None,
    task=None,
    model=None,
    guard=None,
    report=False,
    lr=3e-3,
    optimizer=None,
    engine=None,
    kind=CausalPolicy,
    network=build_network,
):
    """Return (trainer, module, data) of a run in `folder`; nothing has happened yet."""
    torch.manual_seed(0)
    module = GRPOModule(
        kind(model_folder(folder / "model", network), **(policy or {})),
        objective=objective or GRPO(scale="none"),
        optimizer=optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=lr)),
        **(model or {}),
    )
    sizes = {"prompts_per_iteration": 4, "group_size": 4, "seed": 0}
    sizes |= {"max_completion_tokens": 8, "max_prompt_tokens": 16}
    module_data = RolloutDataModule(task or DigitTask(), engine or TransformersEngine(), **{**sizes, **(data or {})})
    options = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "log_every_n_steps": 1,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "accumulate_grad_batches": module_data.parts,
        "enable_progress_bar": False,
        "default_root_dir": str(folder / "run"),
        "logger": RunCSVLogger(folder / "run"),
        **(trainer or {}),
    }
    forced = [
        WeightPublisher(**{"format": format, **(publisher or {})}),
        MismatchMonitor(),
        Guard(**(guard or {})),
        RunCheckpoint(),
    ]
    if report:  # drawing takes seconds
        forced.append(Report(samples_per_iteration=1))
    if options["enable_progress_bar"]:
        forced.append(RLProgress())
    return Trainer(callbacks=[*callbacks, *forced], **options), module, module_data


def fit(folder: Path, ckpt_path=None, **options):
    """Run `build(...)` to its end, from a checkpoint where one is given, and return (trainer, module, data)."""
    trainer, module, data = build(folder, **options)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return trainer, module, data


def configured(model, kind=CausalPolicy, **options) -> CausalPolicy:
    """A policy of a folder, with its weights."""
    policy = kind(str(model), **options)
    policy.configure()
    return policy


def interrupted(folder: Path, at: int, **options) -> Path:
    """Run `build(...)` until a user stops it at the start of an iteration, and return its last checkpoint."""

    class Stop(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == at:
                raise KeyboardInterrupt

    trainer, module, data = build(folder, callbacks=[Stop()], **options)
    with pytest.raises(SystemExit):
        trainer.fit(module, datamodule=data)
    return folder / "run" / "checkpoints" / "last.ckpt"


def parameters_of(module: GRPOModule) -> torch.Tensor:
    """All weights of the policy as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in module.policy.parameters()])


def calling(**hooks):
    """A callback of these functions, each named as the hook that calls it; its class is called after them."""
    methods = {name: lambda self, *given, _hook=hook, **more: _hook(*given, **more) for name, hook in hooks.items()}
    return type(f"Calling_{'_'.join(hooks)}", (RLCallback,), methods)()


class Twin(Callback):
    """An fp32 copy of the weights, stepped on with the run's own gradients."""

    def __init__(self, optimizer):
        self.build = optimizer

    def on_train_start(self, trainer, pl_module):
        self.named = {
            name: nn.Parameter(p.detach().float().clone())
            for name, p in pl_module.named_parameters()
            if p.requires_grad
        }
        self.start = self.weights().clone()
        self.optimizer = self.build(list(self.named.items()))

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        held = dict(pl_module.named_parameters())
        if all(held[name].grad is None for name in self.named):
            return
        for name, parameter in self.named.items():
            grad = held[name].grad
            parameter.grad = None if grad is None else grad.detach().float()
        self.optimizer.step()

    def on_train_end(self, trainer, pl_module):
        self.on_before_zero_grad(trainer, pl_module, None)  # the last step's

    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.named.values()])


class TellingEngine(TransformersEngine):
    """Tells in `story` what it is asked for, before it does it."""

    LOADS = ("load_weights", "load_adapter", "perturb")

    def __init__(self):
        super().__init__()
        self.story = []

    def asked(self, name):
        self.story.append(name)

    @property
    def loads(self):
        return [name for name in self.story if name in self.LOADS]


def _told(name):
    def method(engine, *args, **options):
        engine.asked(name)
        return getattr(super(TellingEngine, engine), name)(*args, **options)

    return method


for _name in (*TellingEngine.LOADS, "setup", "generate", "score", "close"):
    setattr(TellingEngine, _name, _told(_name))


class Watch(RLCallback):
    """Keeps of each rollout its tokens and versions, the mismatch, and what `look` says of (module, engine)."""

    def __init__(self, look=None):
        self.look, self.tokens, self.versions, self.mismatch, self.seen = look, [], [], [], []

    def on_rollout_end(self, trainer, module, batch):
        self.tokens.append(batch.tokens.clone())
        self.versions += sorted(set(batch.version.tolist()))
        self.mismatch.append(float((module.score(batch) - batch.sampler_logprobs)[batch.mask].abs().max()))
        if self.look is not None:
            self.seen.append(self.look(module, module.data.engine))
