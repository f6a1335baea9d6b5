"""vLLM imports the class of a model in a process of its own to see what it can do: half a minute at a first start.

It keeps a process without CUDA as it is, to fork workers of; an engine in the trainer's process has none, and imports
the class anyway.
"""

from typing import Any

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions


def _here(original: Any) -> Any:
    del original

    def inspect_model_cls(model: Any) -> Any:
        from vllm.model_executor.models.registry import _ModelInfo

        return _ModelInfo.from_model_cls(model.load_model_cls())

    return inspect_model_cls


PATCH = Patch(
    __name__,
    Versions("0.26"),
    "an engine without processes of its own inspects its model in this one",
    {"vllm.model_executor.models.registry:_LazyRegisteredModel.inspect_model_cls": _here},
    ["vllm.model_executor.models.registry:_ModelInfo.from_model_cls"],
)
