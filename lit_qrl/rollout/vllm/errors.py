"""Whose an error is that ends a publish into vLLM: the sender's, the engine's, or that of what was sent."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from lit_qrl.errors import ConfigError, MemoryShortageError, out_of_memory
from lit_qrl.receipts.ledger import PublishError, RefusedError
from lit_qrl.rollout.engine import EngineDiedError
from lit_qrl.rollout.vllm.watchdog import Watchdog

LONGEST = 300
"""Characters of vLLM's own words that are shown: it may list every parameter of the model."""
SHAPES = re.compile("exceeds dimension size|must match the|size mismatch|invalid for input of size")
"""What torch says of a tensor that does not fit where vLLM's loader puts it; the engine is none the worse."""


@contextmanager
def blamed(
    tensors: Iterator[tuple[str, Tensor]], version: int, watchdog: Watchdog
) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Give the stream to load; what vLLM raises inside is its death or its loader's refusal, the sender's stays.

    Args:
        tensors: of the publish, as the sender makes them.
        version: of the publish.
        watchdog: whose clock starts anew at every tensor.

    Raises:
        EngineDiedError: for a crash, or a tensor that takes too long.
        RefusedError: for a tensor that vLLM's loader does not know, or of another shape than it expects.
    """
    sender_failed = False

    def stream() -> Iterator[tuple[str, Tensor]]:
        nonlocal sender_failed
        try:
            for name, tensor in tensors:
                watchdog.beat()
                yield name, tensor
        except Exception:
            sender_failed = True
            raise

    try:
        with watchdog:
            yield stream()
    except PublishError:
        raise
    except TimeoutError as error:
        raise EngineDiedError(f"The publish hangs: {error}") from error
    except (RuntimeError, MemoryError, ValueError, KeyError, AssertionError) as error:
        if sender_failed or isinstance(error, ConfigError):
            raise
        said = f"{type(error).__name__}: {error}".rstrip(": .")
        if isinstance(error, (RuntimeError, MemoryError)) and not SHAPES.search(said):
            raise EngineDiedError(f"vLLM failed while loading: {said}") from error
        shown = " ".join(said.split())
        shown = f"{shown[:LONGEST]} …" if len(shown) > LONGEST else shown
        raise RefusedError(
            f"vLLM's own loader raised {shown}. It knows the model under other names or in other shapes than are sent: "
            "take another version of vLLM, or TransformersEngine.",
            version,
        ) from error


@contextmanager
def deadly(what: str, watchdog: Watchdog, remedy: str = "") -> Iterator[None]:
    """Watch over a sleep or a wake; what vLLM raises inside is its death, but for memory that one paragraph tells of.

    Args:
        what: the engine did not do, such as "did not wake".
        watchdog: of the work.
        remedy: where memory runs out.

    Raises:
        EngineDiedError: for a crash, or when it takes too long.
    """
    try:
        with watchdog:
            yield
    except MemoryShortageError:
        raise
    except (RuntimeError, MemoryError, TimeoutError) as error:
        advice = f". {remedy}" if remedy and out_of_memory(error) else ""
        raise EngineDiedError(f"vLLM {what}: {type(error).__name__}: {error}{advice}") from error
