"""An optimizer as configured, over parameters with names; what cannot work is known before a weight is loaded."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_qrl.errors import ConfigError
from lit_qrl.run.description import Described, describe

RATE, ADAPTER_RATE = 1e-6, 1e-5
"""Learning rates of an optimizer of Adam's kind that is given none: of all weights, and of an adapter alone.

A policy from the hub is trained to the end already, and torch's 1e-3 a step and weight undoes that. 1e-6 is TRL's
default and QaRL's rate; an adapter starts at zero and takes about ten times as much (QeRL: 1e-5).
"""


def leaves_open(cls: type[Optimizer]) -> list[str]:
    """Return the settings for which a class has defaults that fit no policy: torch's own rates, and Adam's decay.

    >>> leaves_open(torch.optim.AdamW), leaves_open(torch.optim.SGD)
    (['lr', 'weight_decay'], ['lr'])
    """
    names = ["lr", "weight_decay"] if "Adam" in cls.__name__ else ["lr"] if cls.__module__[:11] == "torch.optim" else []
    return [name for name in names if name in inspect.signature(cls).parameters]


def filled_in(cls: type[Optimizer], given: Mapping[str, Any], adapted: bool) -> dict[str, Any]:
    """Return what an optimizer is to be given beside what it is given: Adam's kind a rate, and no decay.

    Args:
        cls: of the optimizer.
        given: its arguments by name; None stands for none.
        adapted: an adapter alone is trained.

    Raises:
        ConfigError: for a class of torch that is given no rate and whose rate means something else than Adam's.

    >>> filled_in(torch.optim.AdamW, {}, adapted=False), filled_in(torch.optim.AdamW, {"lr": 1e-4}, adapted=True)
    ({'lr': 1e-06, 'weight_decay': 0.0}, {'weight_decay': 0.0})
    """
    missing = [name for name in leaves_open(cls) if given.get(name) is None]
    if "lr" in missing and "Adam" not in cls.__name__:
        raise ConfigError(
            f"model.optimizer is {cls.__name__} without a learning rate.",
            expected="lr, which is filled in for optimizers of Adam's kind alone",
            given="none",
            remedy="Set model.optimizer.init_args.lr; in Python, give partial(cls, lr=…).",
        )
    settings = {"lr": ADAPTER_RATE if adapted else RATE, "weight_decay": 0.0}
    return {name: settings[name] for name in missing}


def with_settings(optimizer: Callable[[Any], Optimizer], adapted: bool) -> Callable[[Any], Optimizer]:
    """Return an optimizer as it is to be built: `filled_in` where it is a class or a `partial` of one.

    Args:
        optimizer: as given; what is neither decides for itself.
        adapted: an adapter alone is trained.
    """
    given, parts = {}, (optimizer,)
    if isinstance(optimizer, partial):
        given, parts = optimizer.keywords, (optimizer.func, *optimizer.args)
    cls = next((one for one in parts if isinstance(one, type) and issubclass(one, Optimizer)), None)
    filled = {} if cls is None else filled_in(cls, given, adapted)
    return partial(optimizer, **filled) if filled else optimizer


def described_rate(optimizer: Optimizer, schedule: str) -> str:
    """Return what an optimizer does with a gradient, as part of a sentence.

    Args:
        optimizer: in a run.
        schedule: in words.

    >>> described_rate(torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=1e-6), "constant")
    'AdamW, learning rate 1e-06 (constant), weight decay 0.01'
    """
    inner = getattr(optimizer, "inner", optimizer)  # of fp32 masters
    found = []
    for key, word in (("lr", "learning rate"), ("weight_decay", "weight decay")):
        values = dict.fromkeys(
            group.get("initial_lr", group[key]) if key == "lr" else group[key]
            for group in optimizer.param_groups
            if key in group
        )
        if values:
            found.append(f"{word} {' and '.join(f'{float(value):g}' for value in values)}")
    found[:1] = [f"{one} ({schedule})" for one in found[:1]]
    return ", ".join([type(inner).__name__, *found])


def check_optimizer(optimizer: Callable[[Any], Optimizer], device: torch.device, vectors: bool = True) -> None:
    """Raise `ConfigError` where an optimizer cannot be built as configured, or not step on the device.

    Tried on a parameter or two of its own, so that it is known before any weight is loaded.

    Args:
        optimizer: makes one from pairs of name and parameter.
        device: of the training.
        vectors: the model trains vectors too (norms), not matrices alone.
    """
    # 64 × 64 is the smallest that bitsandbytes keeps in 8 bits.
    shapes: list[tuple[int, ...]] = [(64, 64), (64,)] if vectors else [(64, 64)]
    trial = [(f"trial.{i}", torch.nn.Parameter(torch.zeros(shape, device=device))) for i, shape in enumerate(shapes)]
    made = build_optimizer(optimizer, trial)
    if callable(getattr(made, "train", None)) and callable(getattr(made, "eval", None)):  # schedule-free ones
        raise ConfigError(
            f"{type(made).__name__} has other weights in training than in evaluation, between which its `train()` and "
            "`eval()` switch: the sampler would draw from the first.",
            expected="an optimizer whose weights are what is sampled from and saved",
            given=f"{type(made).__module__}.{type(made).__name__}",
            remedy="Set model.optimizer to torch.optim.AdamW.",
        )
    for _, parameter in trial:
        parameter.grad = torch.ones_like(parameter)
    asked = 0

    def closure() -> float:  # Lightning gives one too, without which some take none
        nonlocal asked
        asked += 1
        return 0.0

    try:
        made.step(closure)
    except Exception as error:  # a missing kernel shows itself as an error of many kinds
        kernels = type(made).__module__.startswith("bitsandbytes")
        wanted = "a device that the installed bitsandbytes has kernels for, such as CUDA"
        raise ConfigError(
            f"{type(made).__name__}{' of bitsandbytes' if kernels else ''} cannot take a step on {device}.",
            expected=wanted if kernels else "an optimizer for dense gradients",
            given=f"{type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('.')}",
            remedy=f"{'Train on a GPU, or set' if kernels else 'Set'} model.optimizer to torch.optim.AdamW.",
        ) from error
    if asked > 1:  # old log-probs, corrections and metrics are of the weights before the step
        raise ConfigError(
            f"{type(made).__name__} evaluates the loss several times in one step, of which old log-probs, corrections "
            "and metrics are those of one.",
            expected="an optimizer that evaluates it once a step",
            given=f"{asked} evaluations",
            remedy="Set model.optimizer to torch.optim.AdamW.",
        )


def build_optimizer(optimizer: Callable[[Any], Optimizer], named: Iterable[tuple[str, Tensor]]) -> Optimizer:
    """Return `optimizer(named)`; what its class refuses becomes a `ConfigError`."""
    try:
        return optimizer(named)
    except ConfigError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:
        matrices_only = isinstance(error, ValueError) and "2D" in str(error)
        remedy = "Use MuonAdamW, which gives AdamW the rest." if matrices_only else "Correct its init_args."
        raise ConfigError(f"model.optimizer cannot be built: {str(error).rstrip('.')}.", remedy=remedy) from error


def described_optimizer(optimizer: Callable[[Any], Optimizer]) -> dict[str, Any]:
    """Return class and settings of an optimizer: those of one that it makes for a trial parameter.

    >>> described_optimizer(lambda named: torch.optim.SGD(named, lr=0.5))["init_args"]["lr"]
    0.5
    """
    made = build_optimizer(optimizer, [("trial", torch.nn.Parameter(torch.zeros(64, 64)))])
    # All of them: the parser would fill gaps with the settings of the class that is the default.
    known = describe(made)["init_args"] if isinstance(made, Described) else describe(dict(made.defaults))
    parameters = inspect.signature(type(made)).parameters
    arguments = {name: known[name] for name in parameters if name in known and name != "params"}
    return {**describe(type(made)), "init_args": arguments}
