"""How far the routers of a mixture of experts have moved since its rollout was scored (RSPO)."""

import torch
from jaxtyping import Float
from torch import Tensor

from lit_qrl.errors import ConfigError
from lit_qrl.functional._statistics import as_float


def check_floor(floor: float) -> None:
    """Raise `ConfigError` for a floor that is no ratio."""
    if not 0 < floor <= 1:
        raise ConfigError("floor of RouterShift is the smallest ratio.", expected="a number in (0, 1]", given=floor)


def router_shift(
    now: Float[Tensor, "b t layers k"], before: Float[Tensor, "b t layers k"], floor: float
) -> Float[Tensor, "b t"]:
    """Return γ = max(floor, exp(−mean over layers and experts of |log r − log r_old|)), without a gradient.

    r is what a router gives an expert that the token took: 1 where nothing moved, less the farther the routers are.
    After the router-shift ratio of RSPO, Zhang et al., arXiv:2510.23027, which rescales the importance ratio by it
    before it is clipped.

    Args:
        now: log-probs of the routers that are trained.
        before: those of learner_old.
        floor: in (0, 1].

    >>> before = torch.tensor([[[[0.5, 0.25]]]]).log()
    >>> router_shift(before + torch.tensor([0.1, -0.3]), before, 0.5), router_shift(before - 9, before, 0.5)
    (tensor([[0.8187]]), tensor([[0.5000]]))
    """
    moved = (as_float(now.detach()) - as_float(before)).abs().flatten(2).mean(dim=2)
    return torch.exp(-moved).clamp(min=floor)
