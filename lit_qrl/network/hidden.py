"""The hidden states from which a model predicts the completions of a batch, with the experts that its tokens take."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_qrl.network.invariant import as_entered
from lit_qrl.network.modes import repeating
from lit_qrl.network.padding_free import flat_hidden, flatten, is_padding_free
from lit_qrl.network.routing import Routing, as_routed, unrouted
from lit_qrl.network.structure import body
from lit_qrl.types import RolloutBatch


class ScoredHidden(NamedTuple):
    """Last hidden states before completion tokens.

    Args:
        states: "m h" of the scored tokens, or "b t h".
        scored: positions "m" of the scored tokens in the mask: rows, steps; None where all are there.
        routes: "b s layers k", the experts that the model's routers chose themselves; None where not asked for.
        gates: "b s layers k", the routers' log-probs for the experts that were taken; None where the batch has none.
    """

    states: Tensor
    scored: tuple[Tensor, Tensor] | None
    routes: Tensor | None
    gates: Tensor | None = None


def scored_hidden(network: Any, batch: RolloutBatch, routes: bool = False, attention: Any = None) -> ScoredHidden:
    """Return the hidden states that predict the completions; where the batch holds routes, its tokens take those.

    Args:
        network: a causal language model.
        batch: the sequences.
        routes: also return the routers' own choices.
        attention: of a layout, as `FlatBatch` has it; None is torch's.
    """
    if is_padding_free(network):
        flat = flatten(batch).to(batch.tokens.device) if batch.layout is None else batch.layout
        flat.attention = attention
        given = None if batch.routed_experts is None else flat.laid_out(batch.routed_experts)
        with _routing(network, given, routes, batch) as routing:
            hidden = flat_hidden(network, flat)
        own = None if not routes or routing is None else routing.own
        gates = None if routing is None else routing.gates
        return ScoredHidden(
            hidden,
            flat.scored,
            None if own is None else flat.put_back(own, unrouted(own.dtype)),
            None if gates is None else flat.put_back(gates, 0),
        )
    return _padded(network, batch, routes)


def _routing(
    network: Any, given: Tensor | None, routes: bool, batch: RolloutBatch
) -> AbstractContextManager[Routing | None]:
    gates = batch.router_logprobs is not None
    asked = routes or gates or given is not None
    return Routing(network, given, gates=gates).applied() if asked else nullcontext()


def _padded(network: Any, batch: RolloutBatch, routes: bool) -> ScoredHidden:
    """Return the same from a padded batch.

    Each row is turned so that its left padding comes last: attention is then plainly causal, needs no mask, and the
    positions count from 0.
    """
    s, t = batch.tokens.shape[1], batch.mask.shape[1]
    padding = (s - t - batch.prompt_length)[:, None]
    columns = torch.arange(s, device=batch.tokens.device)
    turned = (columns + padding) % s
    tokens = batch.tokens.gather(1, turned)
    rows = torch.arange(len(batch), device=tokens.device)[:, None]
    given = None if batch.routed_experts is None else batch.routed_experts[rows, turned].flatten(0, 1)
    with _routing(network, given, routes, batch) as routing:
        hidden = body(network)(input_ids=tokens, use_cache=False).last_hidden_state
    own, gates = None, None if routing is None else routing.gates
    if routes and routing is not None:
        own = routing.own.unflatten(0, tokens.shape)[rows, (columns - padding) % s]
    if gates is not None:
        gates = gates.unflatten(0, tokens.shape)[rows, (columns - padding) % s]
    predictors = columns[s - t - 1 : s - 1] - padding
    if scores_all(batch.mask):
        return ScoredHidden(hidden[rows, predictors], None, own, gates)
    scored = batch.mask.nonzero(as_tuple=True)
    return ScoredHidden(hidden[scored[0], predictors[scored]], (scored[0], scored[1]), own, gates)


def scores_all(mask: Tensor) -> bool:
    """Return whether all positions are scored: looking at the mask to score less would stall an accelerator."""
    return mask.device.type != "cpu"


def recomputation() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return the contexts of a checkpointed layer's forward pass and of its repetition, which must compute the same.

    It is the `context_fn` of `torch.utils.checkpoint`; the second pass runs in the backward pass, when what was entered
    around the first is long over.
    """
    return nullcontext(), _entered(as_entered(), as_routed(), repeating())


@contextmanager
def _entered(*contexts: AbstractContextManager) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
