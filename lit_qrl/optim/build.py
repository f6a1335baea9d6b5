"""An optimizer as configured, over parameters with names; what cannot work is known before a weight is loaded."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_qrl.errors import ConfigError
from lit_qrl.run.description import Described, describe


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
