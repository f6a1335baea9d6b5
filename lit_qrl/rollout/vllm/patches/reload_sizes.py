"""A reload adds up what waits of all layers at every tensor while two wait, to warn of it: quadratic in the experts.

Of 48 layers of 128 experts it came to the eleventh in two minutes.
"""

from typing import Any

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions, without

_LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"


def nothing(original: Any) -> Any:
    """Return a function that says of every layer that nothing waits."""
    del original

    def get_info_size(info: Any) -> int:
        del info
        return 0

    return get_info_size


PATCH = Patch(
    __name__,
    Versions("0.26", "0.32"),
    "vLLM adds them up once for each reload, as 0.32 does",
    {f"{_LAYERWISE}:get_info_size": nothing},
    [f"{_LAYERWISE}:logger"],
    also=without(f"{_LAYERWISE}:logger", "of device memory to buffers to load"),
)
