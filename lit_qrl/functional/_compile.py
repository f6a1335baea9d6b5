"""One place that decides whether a statistic runs as written or as a few fused kernels."""

import logging
import os
from collections.abc import Callable
from functools import wraps
from inspect import unwrap
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from lit_qrl.types import no_all_reduce

log = logging.getLogger(__name__)

SWITCH = "LIT_QRL_COMPILE"
"""Environment variable: 0 never compiles, 1 also compiles on the CPU; by default CUDA tensors are compiled for."""

Function = TypeVar("Function", bound=Callable[..., Any])
Compiled = Callable[..., Any]

_compiled: dict[tuple, Compiled | None] = {}


def fused(function: Function) -> Function:
    """Return `function`, which then runs compiled when its first argument is a CUDA tensor.

    These statistics are hundreds of small kernels, and on a GPU launching them is what they cost. Compiled, they are a
    few. The function takes tensors (or lists of them) by position and constants by keyword, and is compiled once for
    every combination of constants, for any shape. Over several ranks it runs as written, since a collective in its
    middle would cut the kernels apart again. Where compiling fails, it runs as written too, which is logged once.
    """

    @wraps(function)
    def call(*tensors: Any, **constants: Any) -> Any:
        if torch.compiler.is_compiling() or not _wanted(tensors[0], constants.get("all_reduce")):
            return function(*tensors, **constants)
        key = (function, *sorted((name, value) for name, value in constants.items() if name != "all_reduce"))
        first = key not in _compiled
        if first:
            log.info("Compiling %s for this device, once.", function.__name__.strip("_"))
            _compiled[key] = _compile(function)
        compiled = _compiled[key]
        if compiled is None:
            return function(*tensors, **constants)
        try:
            if first:
                # Otherwise constants would become inputs, one more thing to check and to load in every call.
                with torch._dynamo.config.patch(specialize_float=True):
                    return compiled(*tensors, **constants)
            return compiled(*tensors, **constants)
        except Exception as error:
            result = function(*tensors, **constants)  # raises by itself what is the caller's fault
            _compiled[key] = None
            log.warning(
                "%s could not be compiled and runs in more kernels (%s: %s).",
                function.__name__,
                type(error).__name__,
                str(error).partition("\n")[0],
            )
            return result

    return cast(Function, call)


def _wanted(first: Any, all_reduce: Any) -> bool:
    if all_reduce is not None and all_reduce is not no_all_reduce:
        return False
    tensor = first[0] if isinstance(first, (list, tuple)) else first
    if not isinstance(tensor, Tensor):
        return False
    switch = os.environ.get(SWITCH, "")
    return switch != "0" and (tensor.is_cuda or switch == "1")


def _compile(function: Callable) -> Compiled:
    # A code object of its own for every combination of constants: the compiler keeps its caches, with a limit, by code.
    inner = unwrap(function)
    code = inner.__code__.replace()
    copy = FunctionType(code, inner.__globals__, inner.__name__, inner.__defaults__, inner.__closure__)
    copy.__kwdefaults__ = inner.__kwdefaults__
    return torch.compile(copy, dynamic=True)
