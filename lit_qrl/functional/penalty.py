"""Estimates of KL(learner‖reference) from the drawn tokens, as penalties."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from lit_qrl.errors import check_choice
from lit_qrl.functional._checks import check_above
from lit_qrl.functional._statistics import as_float
from lit_qrl.functional.mismatch import k3_divergence

Estimator = Literal["k1", "k2", "k3", "k3+"]


def kl_penalty(
    logprobs: Float[Tensor, "b t"],
    reference_logprobs: Float[Tensor, "b t"],
    estimator: Estimator = "k3+",
    old_logprobs: Float[Tensor, "b t"] | None = None,
    input_clamp: float | None = None,
    output_clamp: float | None = None,
) -> Float[Tensor, "b t"]:
    """Return the estimate of KL(learner‖reference) of every token.

    With ℓ = log p − log p_ref, the gradient of the KL is E_p[ℓ ∇log p]. That of k3 is (1 − e^(−ℓ)) ∇log p, which on
    policy has the mean of ∇KL(reference‖learner): the other direction. `k3+` corrects it. Tokens drawn by an old
    policy stand for the learner's when weighed with r = p / p_old, so that r·k3 has the mean of the KL, and its
    derivative, r's own included,

        ∇(r k3) = r k3 ∇log p + r (1 − e^(−ℓ)) ∇log p = r ℓ ∇log p      since k3 = e^(−ℓ) − 1 + ℓ,

    has the mean of its gradient, on policy and off. It is computed in this last form, in which nothing cancels. At
    r = 1 it is the value of k3 with the gradient of k2 (verl's `k3+`); with r it is DeepSeek-V3.2's unbiased estimate
    (TRL's `use_bias_correction_kl`).

    Args:
        logprobs: "b t", nats; gradients flow.
        reference_logprobs: "b t", nats.
        estimator: `k1` is ℓ: unbiased, of any sign; as a loss its gradient has mean zero, so use it in the reward. `k2`
            is ℓ² / 2: biased, never negative; its gradient is that of the KL on policy. `k3` is e^(−ℓ) − 1 + ℓ:
            unbiased, never negative, its gradient not the KL's; `k3+` has it.
        old_logprobs: "b t", nats, of the policy whose tokens these stand for, detached here; None is the learner
            itself. `k3+` alone looks at it.
        input_clamp: largest |ℓ|, nats; None does not clamp.
        output_clamp: largest |estimate|, nats, before r; None does not clamp. Beyond a clamp a token has no gradient.

    Raises:
        ConfigError: an unknown estimator; a clamp that is not positive.

    >>> import torch
    >>> logprobs = torch.tensor([[-1.0]], requires_grad=True)
    >>> penalty = kl_penalty(logprobs, torch.tensor([[-1.5]]))
    >>> penalty.sum().backward()
    >>> penalty.detach(), logprobs.grad
    (tensor([[0.1065]]), tensor([[0.5000]]))
    """
    check_choice("The estimator of the KL", estimator, ("k1", "k2", "k3", "k3+"))
    check_above(0.0, input_clamp=input_clamp, output_clamp=output_clamp)
    distance = as_float(logprobs) - as_float(reference_logprobs)
    clamped = distance if input_clamp is None else distance.clamp(-input_clamp, input_clamp)
    if estimator == "k1":
        estimate = clamped
    elif estimator == "k2":
        estimate = clamped.square() / 2
    else:
        estimate = k3_divergence(-clamped)
    value = estimate if output_clamp is None else estimate.clamp(-output_clamp, output_clamp)
    if estimator != "k3+":
        return value
    here = as_float(logprobs)
    ratio = 1.0 if old_logprobs is None else (here - as_float(old_logprobs)).detach().exp()
    slope = (ratio * distance * ((clamped == distance) & (value == estimate))).detach()
    return (ratio * value).detach() + slope * (here - here.detach())
