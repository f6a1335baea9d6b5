"""The auxiliary loss that keeps the load of a mixture's experts even, of what its routers say in a forward pass."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_qrl.errors import ConfigError
from lit_qrl.network.routing import routers

COEFFICIENT = "router_aux_loss_coef"
"""What configs call the factor with which a family was trained."""


def balance_loss(logits: Sequence[Tensor], chosen: int, real: Tensor | None = None) -> Tensor:
    """Return E Σ_e f_e P_e, fp32: `chosen` where the load is even, E where all tokens take the same expert.

    f_e is the mean number of choices of expert e by a token, P_e its mean probability, both over the tokens of all
    layers, as in transformers' `load_balancing_loss_func`; Fedus et al., arXiv:2101.03961, eq. 4–6. Gradients go
    through P alone.

    Args:
        logits: of each layer's router, "n experts".
        chosen: experts of a token.
        real: "n", False for padding; None where all are real.

    >>> balance_loss([torch.tensor([[1.0, 0.0], [0.0, 1.0]])], 1).item()
    1.0
    """
    scores = torch.stack([layer.float().softmax(dim=-1) for layer in logits])
    share = (
        torch.ones_like(scores[..., :1]) if real is None else real.to(scores)[None, :, None].expand_as(scores[..., :1])
    )
    taken = torch.zeros_like(scores).scatter(-1, scores.topk(chosen, dim=-1).indices, 1.0)
    rows = share.sum()
    loads, probabilities = ((x * share).sum(dim=(0, 1)) / rows for x in (taken, scores))
    return scores.shape[-1] * (loads * probabilities).sum()


def balance_coefficient(network: Any, given: float | None) -> float:
    """Return the factor of the loss: the one given, or for None the one in the model's config.

    Args:
        network: a causal language model; its weights need not be there.
        given: of the user.

    Raises:
        ConfigError: for a factor where the model has no routers that say logits, or none in its config.
    """
    if given == 0:
        return 0.0
    kind, own = type(network).__name__, getattr(network.config.get_text_config(), COEFFICIENT, None)
    if not routers(network) or own is None:
        raise ConfigError(
            f"objective.load_balance_coefficient evens out the load of experts, and {kind} is not trained with such a "
            "loss.",
            expected=f"a mixture of experts whose config has {COEFFICIENT}, such as Qwen3-MoE, Mixtral or gpt-oss",
            given=f"load_balance_coefficient: {'null' if given is None else given}",
            remedy="Set it to 0.",
        )
    return float(own if given is None else given)


@contextmanager
def router_logits(network: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list that a forward pass inside fills with the logits of each layer's router, "n experts"."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        seen.append(output[0])

    hooks = [router.module.register_forward_hook(keep) for router in routers(network)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def real_tokens(rows: int, total_length: Tensor, width: int) -> Tensor | None:
    """Return which of a forward pass's rows are of tokens, "b s" end to end, or None where all are.

    A padded batch is computed with each row's tokens first; without padding there are no further rows.

    Args:
        rows: of the pass.
        total_length: "b", tokens of prompt and completion.
        width: of the padded batch.

    >>> real_tokens(6, torch.tensor([1, 3]), 3).tolist()
    [True, False, False, True, True, True]
    """
    if rows != len(total_length) * width:
        return None
    return (torch.arange(width, device=total_length.device) < total_length[:, None]).flatten()
