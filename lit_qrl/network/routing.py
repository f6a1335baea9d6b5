"""Which experts a mixture of experts takes for each token: routers found, their choices recorded and replayed.

A router scores all experts and chooses k of them by `topk`; what it makes of the scores of the chosen ones (a softmax,
a sum of 1, a scale) is the model's own. So a choice is recorded and replaced at that one call: the indices are the
given ones, the values are gathered there from the module's own scores, and gradients go through them.

A choice is "n layers k": tokens in the order in which the model lays them out (rows of a batch end to end), the layers
that have experts, and the numbers of the chosen ones, in one byte each where there are at most 255.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lit_qrl.errors import ConfigError, listed
from lit_qrl.network.experts import ExpertStack
from lit_qrl.network.structure import MASKS_SCORES


def unrouted(dtype: torch.dtype) -> int:
    """Return the number that says that no choice is known for a token, in choices of a dtype.

    >>> unrouted(torch.uint8)
    255
    """
    return torch.iinfo(dtype).max


def route_dtype(experts: int) -> torch.dtype:
    """Return the smallest dtype for the numbers of so many experts, and `unrouted`.

    >>> route_dtype(255), route_dtype(256)
    (torch.uint8, torch.int16)
    """
    return torch.uint8 if experts <= unrouted(torch.uint8) else torch.int16


@dataclass(frozen=True)
class Router:
    """The part of a layer that chooses its experts.

    Args:
        name: of the module.
        module: from hidden states to scores and choice.
        experts: to choose from.
        chosen: by each token.
    """

    name: str
    module: nn.Module
    experts: int
    chosen: int


def routers(network: nn.Module) -> list[Router]:
    """Return the routers of a model, in the order of its layers; an empty list for a dense one.

    A router has a matrix with a row for each expert, and says itself how many there are and how many it chooses.

    >>> gate = nn.Linear(4, 8)
    >>> gate.num_experts, gate.top_k = 8, 2
    >>> [(router.name, router.experts, router.chosen) for router in routers(nn.ModuleDict({"gate": gate}))]
    [('gate', 8, 2)]
    """
    found = []
    for name, module in _outside_experts(network):
        weight, experts, chosen = (getattr(module, part, None) for part in ("weight", "num_experts", "top_k"))
        rows = len(weight) if isinstance(weight, Tensor) and weight.ndim == 2 else None
        if isinstance(experts, int) and isinstance(chosen, int) and rows == experts:
            found.append(Router(name, module, experts, chosen))
    return found


def _outside_experts(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield what `named_modules` does, without the matrices of experts held one by one.

    There are 18,432 of them in 48 layers of 128 experts, and looking at each takes longer than a forward pass's replay.
    """
    yield name, module
    if not isinstance(module.__dict__.get("stack"), ExpertStack):
        for key, child in module.named_children():
            yield from _outside_experts(child, f"{name}.{key}" if name else key)


def check_routers(network: nn.Module, user: str) -> None:
    """Raise `ConfigError` for a model whose routes cannot be recorded and replayed; its weights need not be there.

    Args:
        network: a causal language model.
        user: what needs them, for the error.
    """
    kind, found = type(network).__name__, routers(network)
    if not found:
        raise ConfigError(
            f"{user} replays which experts each token took, and no router is found in this model.",
            expected="a mixture of experts, such as Qwen3-MoE, Mixtral, DeepSeek-V3, GLM-4-MoE, gpt-oss or Llama 4",
            given=kind,
            remedy=f"Remove {user} from trainer.callbacks.",
        )
    if len({router.chosen for router in found}) > 1:
        counts = listed(f"{router.chosen} in {router.name}" for router in found)
        raise ConfigError(f"{user} needs as many experts for a token in every layer.", given=counts)
    odd = {type(router.module).__name__ for router in found if not _replayable(router)}
    if odd:
        raise ConfigError(
            f"{user} cannot replace what this model's routers choose.",
            expected="routers that choose by one topk over the scores of all experts and weigh by those scores",
            given=f"{kind} with {', '.join(sorted(odd))}",
            remedy=f"Remove {user} from trainer.callbacks.",
        )


def _replayable(router: Router) -> bool:
    """Return whether a router's choice goes through `topk` and its weights do not depend on it beforehand."""
    if getattr(router.module, "topk_method", None) in MASKS_SCORES:
        return False
    weight: Any = router.module.weight
    on_meta = copy.deepcopy(router.module).to("meta")
    choice = _Choice(router, None)
    try:
        with torch.no_grad(), choice:
            on_meta(torch.empty(1, weight.shape[1], dtype=weight.dtype, device="meta"))
    except (RuntimeError, NotImplementedError):  # what it does depends on the scores
        return False
    return choice.own is not None


class _Choice(TorchFunctionMode):
    """Sees the choice of one router in one forward pass, and replaces it where one is given.

    Args:
        router: whose forward pass runs inside.
        given: "n k", or None.
    """

    def __init__(self, router: Router, given: Tensor | None) -> None:
        super().__init__()
        self.router, self.given = router, given
        self.own: Tensor | None = None
        self.taken: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        # Routers with groups of experts have other calls before: over groups, or within each.
        if scores.ndim != 2 or result[1].shape[1] != self.router.chosen or scores.shape[1] != self.router.experts:
            return result
        self.own = self.taken = result[1]
        if self.given is None:
            return result
        if len(self.given) != len(scores):  # those of one token would be taken for all
            raise ValueError(
                f"{self.router.name} is given the routes of {len(self.given)} tokens in a forward pass of "
                f"{len(scores)}. Expected: one route for each token."
            )
        given = self.given.long()
        chosen = self.taken = torch.where(given == unrouted(self.given.dtype), result[1], given)
        return torch.return_types.topk((scores.gather(1, chosen), chosen))


class Routing:
    """Records, and where a choice is given replays, the experts of every token of one forward pass.

    >>> from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    >>> sizes = {"vocab_size": 8, "hidden_size": 8, "head_dim": 4, "num_attention_heads": 2, "num_key_value_heads": 2}
    >>> sizes |= {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}
    >>> network = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    >>> with Routing(network).applied() as routing:
    ...     _ = network(input_ids=torch.tensor([[1, 2, 3]]))
    >>> tuple(routing.own.shape), routing.own.dtype
    ((3, 2, 2), torch.uint8)

    Args:
        network: the model whose forward pass runs inside; it is not changed for longer.
        replayed: "n layers k", the choice to replay; tokens for which it is `unrouted` go where the router says.
        found: the model's routers, for a caller with many passes.
        gates: also keep what the routers give the experts that are taken.

    Raises:
        ValueError: for routes of another number of layers or experts.
    """

    def __init__(
        self,
        network: nn.Module,
        replayed: Tensor | None = None,
        found: Sequence[Router] | None = None,
        gates: bool = False,
    ) -> None:
        self.routers, self.replayed = routers(network) if found is None else found, replayed
        self._dtype = route_dtype(max((router.experts for router in self.routers), default=0))
        self._own: dict[int, Tensor] = {}
        self._gates: dict[int, Tensor] | None = {} if gates else None
        wanted = (len(self.routers), self.routers[0].chosen) if self.routers else (0, 0)
        if replayed is not None and replayed.shape[1:] != wanted:
            raise ValueError(
                f"Routes do not fit the model. Expected: layers and k {wanted}. Given: {tuple(replayed.shape[1:])}."
            )

    @property
    def own(self) -> Tensor:
        """What the routers chose themselves, "n layers k": under a replay, after the layers before took the given."""
        return torch.stack([self._own[layer] for layer in range(len(self.routers))], dim=1)

    @property
    def gates(self) -> Tensor | None:
        """Log-probs "n layers k", fp32, of the routers for the experts that are taken; None where not asked for."""
        if self._gates is None:
            return None
        return torch.stack([self._gates[layer] for layer in range(len(self.routers))], dim=1)

    @contextmanager
    def applied(self) -> Iterator["Routing"]:
        """Act on what runs inside, in this thread."""
        # by their dictionaries: each layer that is computed again comes here for all routers, and a module's own
        # __setattr__ takes ten times as long
        held = [router.module.__dict__ for router in self.routers]
        former = [attributes.get("forward") for attributes in held]
        for layer, (router, attributes) in enumerate(zip(self.routers, held, strict=True)):
            attributes["forward"] = partial(self._forward, layer, router.module.forward)
        token = _active.set(self)
        try:
            yield self
        finally:
            _active.reset(token)
            for attributes, forward in zip(held, former, strict=True):
                if forward is None:
                    del attributes["forward"]
                else:
                    attributes["forward"] = forward

    def _forward(self, layer: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        choice = _Choice(self.routers[layer], None if self.replayed is None else self.replayed[:, layer])
        with choice:
            result = forward(*args, **kwargs)
        if choice.own is None:
            raise RuntimeError(f"{self.routers[layer].name} chose no experts by topk, so its routes are not known.")
        self._own[layer] = choice.own.to(self._dtype)
        if self._gates is not None and choice.taken is not None:  # all routers return their logits first
            self._gates[layer] = result[0].detach().float().log_softmax(dim=-1).gather(1, choice.taken)
        return result


_active: ContextVar[Routing | None] = ContextVar("routing", default=None)


def as_routed() -> AbstractContextManager[object]:
    """Return the context in which a layer that is computed again takes the routes that are replayed now."""
    routing = _active.get()
    return nullcontext() if routing is None or routing.replayed is None else routing.applied()


def differing(own: Tensor, replayed: Tensor) -> Tensor:
    """Return "n layers", True where two choices are not of the same experts; their order does not count.

    Args:
        own: "n layers k".
        replayed: "n layers k".

    >>> differing(torch.tensor([[[0, 1], [2, 3]]]), torch.tensor([[[1, 0], [2, 0]]]))
    tensor([[False,  True]])
    """
    return (own.sort(dim=-1).values != replayed.sort(dim=-1).values).any(dim=-1)


def experts_taken(routes: Tensor, experts: int) -> Tensor:
    """Return "layers experts": by how many tokens each expert was taken.

    Args:
        routes: "n layers k"; tokens that are `unrouted` are not counted.
        experts: of each layer.

    >>> experts_taken(torch.tensor([[[0, 1]], [[1, 2]]], dtype=torch.uint8), 4)
    tensor([[1, 2, 1, 0]])
    """
    layers = routes.shape[1]
    known = routes.transpose(0, 1).flatten(1).long()
    slots = torch.where(known == unrouted(routes.dtype), experts, known)
    counts = slots.new_zeros(layers, experts + 1).scatter_add_(1, slots, torch.ones_like(slots))
    return counts[:, :experts]
