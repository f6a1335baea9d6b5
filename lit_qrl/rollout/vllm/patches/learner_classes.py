"""For an architecture without code of its own vLLM runs transformers' model, and changes its class for `torch.compile`.

The learner's model is of that class in the same process. Its forward pass then asked for what vLLM's constructor sets:
`AttributeError: 'Olmo2Model' object has no attribute 'do_not_compile'`. Models that vLLM did not build keep the methods
that the class had.
"""

from functools import wraps
from typing import Any

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions


def apart(original: Any) -> Any:
    """Return vLLM's decorator of classes, whose methods act on models alone that vLLM builds."""

    def support(cls: type, *args: Any, **named: Any) -> type:
        from transformers import PreTrainedModel
        from vllm.config import get_current_vllm_config_or_none

        init, call = cls.__init__, cls.__call__
        made = original(cls, *args, **named)
        theirs_init, theirs_call = cls.__init__, cls.__call__
        if not issubclass(cls, PreTrainedModel) or theirs_call is call:  # or changed before
            return made

        @wraps(init)
        def construct(self: Any, *args: Any, **named: Any) -> None:
            building = get_current_vllm_config_or_none() is not None
            (theirs_init if building else init)(self, *args, **named)

        @wraps(call)
        def run(self: Any, *args: Any, **named: Any) -> Any:
            return (theirs_call if "do_not_compile" in vars(self) else call)(self, *args, **named)

        cls.__init__, cls.__call__ = construct, run
        return made

    return support


PATCH = Patch(
    __name__,
    Versions("0.26"),
    "vLLM compiles classes of its own in place of transformers'",
    {"vllm.compilation.decorators:_support_torch_compile": apart},
    ["vllm.config:get_current_vllm_config_or_none"],
)
