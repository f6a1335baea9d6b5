"""The experts that a router chose, on a CPU, which hands them on to vLLM's second model runner alone.

That runner needs Triton. Here the choices are kept as vLLM 0.26 keeps them on a GPU: by the slot of the KV cache in
which a token's keys lie, so that a prefix found in the cache, a prefill in pieces and a request that was put off have
theirs as well; and they leave with the output of the request that ends.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_qrl.errors import ConfigError, listed
from lit_qrl.network.routing import route_dtype, unrouted
from lit_qrl.rollout.vllm.patches import Patch

_KEPT = "lit_qrl_recorded_routes"


class RecordedRoutes:
    """The experts of every token in the KV cache.

    Args:
        slots: of the cache, for the keys of one token each.
        block_size: slots in a block.
        layers: of the model, dense ones too.
        experts: of a layer.
        chosen: by each token.

    >>> routes = RecordedRoutes(slots=8, block_size=4, layers=1, experts=6, chosen=2)
    >>> routes.write(0, torch.tensor([4, -1]), torch.tensor([[5, 2], [0, 0]]))
    >>> routes.read([1], 2).tolist()
    [[[5, 2]], [[255, 255]]]
    """

    def __init__(self, slots: int, block_size: int, layers: int, experts: int, chosen: int) -> None:
        dtype = route_dtype(experts)
        self.unknown = unrouted(dtype)
        self.table = torch.full((slots, layers, chosen), self.unknown, dtype=dtype)
        self.block_size = block_size
        self.group, self.layer = 0, ""
        self.taken: dict[str, Tensor] = {}

    def forget(self) -> None:
        """Take every choice for unknown: the tokens' keys are of weights that are gone."""
        self.table.fill_(self.unknown)

    def write(self, layer: int, slots: Tensor, chosen: Tensor) -> None:
        """Keep what tokens "n k" chose; a slot below 0 is of none."""
        real = slots >= 0
        self.table[slots[real], layer] = chosen[real].to(self.table.dtype)

    def read(self, blocks: list[int], tokens: int) -> Tensor:
        """Return "tokens layers k" for the first tokens whose keys lie in the blocks."""
        slots = torch.tensor(blocks)[:, None] * self.block_size + torch.arange(self.block_size)
        return self.table[slots.flatten()[:tokens]]

    def capture(self, layer: int, chosen: Tensor) -> None:
        """Keep what the tokens of the forward pass that runs chose in a layer."""
        from vllm.forward_context import get_forward_context

        slots = get_forward_context().slot_mapping
        if isinstance(slots, dict) and self.layer in slots:  # which it is not in a pass that warms up
            self.write(layer, slots[self.layer][: len(chosen)], chosen)


def record(llm: Any, model: nn.Module, layers: Sequence[int], experts: int, chosen: int) -> RecordedRoutes:
    """Begin to record in a running engine, and return what is recorded.

    Args:
        llm: the in-process `vllm.LLM`.
        model: vLLM's.
        layers: numbers of those that have experts.
        experts: of a layer.
        chosen: by each token.

    Raises:
        ConfigError: for a model in which vLLM does not let itself be asked.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler
    config = scheduler.kv_cache_config
    groups = [isinstance(group.kv_cache_spec, FullAttentionSpec) for group in config.kv_cache_groups]
    modules: list[Any] = [
        module
        for module in model.modules()
        if hasattr(module, "routed_experts") and hasattr(getattr(module, "router", None), "set_capture_fn")
    ]
    asked: dict[int, Any] = {module.layer_id: module.router for module in modules}
    if True not in groups or asked.keys() != set(layers):
        raise ConfigError(
            "RouterReplay needs the experts that each token took, and vLLM does not tell them of this model.",
            expected=f"layers with attention to the whole past, and routers in layers {listed(map(str, layers))}",
            given=f"routers in layers {listed(map(str, asked)) or 'none'}",
            remedy="Use TransformersEngine, or set its level to old with several updates for a rollout.",
        )
    index = groups.index(True)
    group, text = config.kv_cache_groups[index], scheduler.vllm_config.model_config.hf_text_config
    size = group.kv_cache_spec.block_size
    routes = RecordedRoutes(config.num_blocks * size, size, text.num_hidden_layers, experts, chosen)
    routes.group, routes.layer = index, group.layer_names[0]
    for layer, router in asked.items():
        router.set_capture_fn(partial(routes.capture, layer))
    setattr(scheduler, _KEPT, routes)
    return routes


def reading_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the scheduler's function that frees a request, which reads its choices before."""

    def free(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        routes: RecordedRoutes | None = getattr(self, _KEPT, None)
        if routes is not None:
            blocks = self.kv_cache_manager.get_block_ids(request.request_id)[routes.group]
            routes.taken[request.request_id] = routes.read(blocks, request.num_tokens - 1)
        return original(self, request, *args, **kwargs)

    return free


def handing_out(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the end of the scheduler's step, which gives the requests that end their choices."""

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(self, *args, **kwargs)
        routes: RecordedRoutes | None = getattr(self, _KEPT, None)
        if routes is not None:
            for one in (one for group in outputs.values() for one in group.outputs):
                if one.request_id in routes.taken:
                    one.routed_experts = routes.taken[one.request_id].numpy()
            routes.taken.clear()
        return outputs

    return update


_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
CHANGES = (
    Patch(
        "recorded_routes",
        "the experts that tokens took are not told without Triton",
        "RouterReplay is refused",
        {f"{_SCHEDULER}._free_request": reading_first, f"{_SCHEDULER}.update_from_output": handing_out},
        [
            "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter.set_capture_fn",
            "vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids",
            "vllm.v1.engine:EngineCoreOutput.routed_experts",
            "vllm.forward_context:ForwardContext",
        ],
        device="cpu",
        first="0.27",
    ),
)
