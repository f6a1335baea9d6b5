"""One place that decides whether a statistic runs as written or compiled into a few kernels, and knows of Triton."""

import logging
import os
from collections.abc import Callable, Iterable
from functools import lru_cache, wraps
from importlib.util import find_spec
from inspect import signature, unwrap
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from lit_qrl.types import no_all_reduce

log = logging.getLogger(__name__)

SWITCH = "LIT_QRL_COMPILE"
"""Environment variable: 0 never compiles, 1 also compiles on the CPU; by default CUDA tensors are compiled for."""

TENSORS = (Tensor, list, tuple)

Function = TypeVar("Function", bound=Callable[..., Any])
_kernels: dict[tuple, Callable[..., Any] | None] = {}
"""By function and constants; None for what could not be compiled."""


@lru_cache
def triton_installed() -> bool:
    """Return True when Triton can be imported."""
    return find_spec("triton") is not None


def compiled(function: Function) -> Function:
    """Return `function`, which then runs compiled when its first tensor is on a CUDA device.

    These statistics are hundreds of small kernels, and on a GPU launching them is what they cost. Compiled, they are a
    few. The function takes tensors (or lists of them) and constants, and is compiled once for every combination of
    constants, for any shape. Over several ranks it runs as written, since a collective in its middle would cut the
    kernels apart again. Where compiling fails, it runs as written too, which is logged once.
    """
    parameters = signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        try:
            given = parameters.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # raises by itself, and names the function
        args, kwargs = given.args, given.kwargs
        arguments = {**dict(zip(parameters.parameters, args, strict=False)), **kwargs}
        all_reduce = arguments.pop("all_reduce", no_all_reduce)
        if all_reduce is not no_all_reduce or not _wanted(arguments.values()):
            return function(*args, **kwargs)
        constants = [item for item in arguments.items() if not isinstance(item[1], TENSORS)]
        key = (function, *sorted(constants))
        first = key not in _kernels
        if first:
            log.debug("Compiling %s for this device, once.", function.__name__.strip("_"))
            _kernels[key] = _compile(function)
        kernels = _kernels[key]
        if kernels is None:
            return function(*args, **kwargs)
        try:
            if first:
                # Otherwise constants would become inputs, one more thing to check and to load in every call.
                with torch._dynamo.config.patch(specialize_float=True):
                    return kernels(*args, **kwargs)
            return kernels(*args, **kwargs)
        except Exception as error:
            result = function(*args, **kwargs)  # raises by itself what is the caller's fault
            _kernels[key] = None
            log.warning(
                "%s could not be compiled and runs in more kernels (%s: %s).",
                function.__name__,
                type(error).__name__,
                str(error).partition("\n")[0],
            )
            return result

    return cast(Function, call)


def _wanted(arguments: Iterable[Any]) -> bool:
    flat = (one for value in arguments for one in (value if isinstance(value, (list, tuple)) else (value,)))
    tensor = next((one for one in flat if isinstance(one, Tensor)), None)
    switch = os.environ.get(SWITCH, "")
    return tensor is not None and switch != "0" and (tensor.is_cuda or switch == "1")


def _compile(function: Callable) -> Callable[..., Any]:
    # A code object of its own for every combination of constants: the compiler keeps its caches, with a limit, by code.
    inner = unwrap(function)
    code = inner.__code__.replace()
    copy = FunctionType(code, inner.__globals__, inner.__name__, inner.__defaults__, inner.__closure__)
    copy.__kwdefaults__ = inner.__kwdefaults__
    return torch.compile(copy, dynamic=True)
