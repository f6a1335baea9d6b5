"""A reload warns of every module that has no weights of its own (rotary embeddings) that it received none."""

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions, without

_LOGGER = "vllm.model_executor.model_loader.reload.layerwise:logger"
PATCH = Patch(
    __name__,
    Versions("0.26"),
    "a reload warns of modules with weights alone",
    needs=[_LOGGER],
    also=without(_LOGGER, "Failed to load weights"),
)
