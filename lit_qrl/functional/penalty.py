"""Estimates of KL(learner‖reference) from the drawn tokens, as penalties."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from lit_qrl.errors import ConfigError
from lit_qrl.functional._statistics import as_float
from lit_qrl.functional.mismatch import k3_divergence

Estimator = Literal["k1", "k2", "k3"]


def k1_penalty(logprobs: Float[Tensor, "b t"], reference_logprobs: Float[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    """Return log p − log p_ref: unbiased, of any sign; as a loss its gradient has mean zero, so use it in the reward.

    >>> import torch
    >>> k1_penalty(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]))
    tensor([[0.5000]])
    """
    return as_float(logprobs) - as_float(reference_logprobs)


def k2_penalty(logprobs: Float[Tensor, "b t"], reference_logprobs: Float[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    """Return (log p − log p_ref)² / 2: biased, never negative; its gradient is that of the KL on policy.

    >>> import torch
    >>> k2_penalty(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]))
    tensor([[0.1250]])
    """
    return k1_penalty(logprobs, reference_logprobs).square() / 2


def k3_penalty(logprobs: Float[Tensor, "b t"], reference_logprobs: Float[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    """Return e^x − 1 − x with x = log p_ref − log p: unbiased, never negative; GRPO's KL term (AIS eq. 4).

    >>> import torch
    >>> k3_penalty(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]))
    tensor([[0.1065]])
    """
    return k3_divergence(-k1_penalty(logprobs, reference_logprobs))


def kl_penalty(
    logprobs: Float[Tensor, "b t"], reference_logprobs: Float[Tensor, "b t"], estimator: Estimator = "k3"
) -> Float[Tensor, "b t"]:
    """Return the estimate of KL(learner‖reference) of every token.

    Args:
        logprobs: "b t", nats; gradients flow.
        reference_logprobs: "b t", nats.
        estimator: `k1`, `k2` or `k3`.

    Raises:
        ConfigError: an unknown estimator.

    >>> import torch
    >>> kl_penalty(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), "k2")
    tensor([[0.1250]])
    """
    penalties = {"k1": k1_penalty, "k2": k2_penalty, "k3": k3_penalty}
    if estimator not in penalties:
        raise ConfigError(
            "Unknown estimator of the KL.", expected="k1, k2 or k3", given=estimator, remedy="Correct it."
        )
    return penalties[estimator](logprobs, reference_logprobs)
