"""The hub, which knows models and data sets by name: what it is asked for is said, and first whether it answers."""

import functools
import os
import sys

from lightning.pytorch.utilities import rank_zero_only

PATIENCE = 2.0
"""Seconds that an answer may take."""


def ask_hub(what: str) -> None:
    """Say on stderr what is asked of the hub; where it cannot be reached, let what was fetched before do, at once.

    Its library would try six times, over 23 seconds, for each model and each data set. `HF_HUB_OFFLINE`, which is what
    this sets then, ends that, also in processes that are started later.

    Args:
        what: is asked for, such as "the model 'Qwen/Qwen3-8B'".
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    say(f"Asking {constants.ENDPOINT} for {what} …")
    if reason := why_unreachable(constants.ENDPOINT):
        say(f"It cannot be reached ({reason}). Only what was fetched before can be taken.")
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:  # one that is imported later reads the above
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True


@functools.cache
def why_unreachable(endpoint: str) -> str | None:
    """Return why no connection to an address can be had, or None where there is one, or no telling.

    An address that does not answer in time is no telling: it may in the library's longer one.

    Args:
        endpoint: the address, such as https://huggingface.co.

    >>> why_unreachable("http://127.0.0.1:1") is None
    False
    """
    from huggingface_hub.utils import get_session

    try:
        get_session().head(endpoint, timeout=PATIENCE)
    except Exception as error:  # of the library's client, which another version has from another package
        kinds = [kind.__name__ for kind in type(error).__mro__]
        unreachable = any("Connect" in kind or "Proxy" in kind for kind in kinds)
        return str(error) if unreachable and "Timeout" not in kinds[0] else None
    return None


@rank_zero_only
def say(text: str) -> None:
    """Print a line on stderr, on the first rank."""
    print(text, file=sys.stderr, flush=True)
