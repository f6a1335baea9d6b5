"""Where the engines of a run are: devices beside the learner's, or servers that run already."""

import re
from collections.abc import Sequence
from typing import TypeVar

import torch

from lit_qrl.errors import ConfigError, listed
from lit_qrl.rollout.engine import Learners
from lit_qrl.rollout.remote.replica import Place
from lit_qrl.rollout.remote.wire import read_token

T = TypeVar("T")


def places(
    devices: str | Sequence[int | str], hosts: Sequence[str] | None, token_file: str | None, learners: Learners
) -> list[Place]:
    """Return where this process of the learner has its engines.

    Args:
        devices: `auto`, or numbers of GPUs and `cpu`.
        hosts: `host:port` of servers, instead of devices.
        token_file: of the servers.
        learners: the processes that share them.

    Raises:
        ConfigError: for a device that is not there or is the learner's, a server without a token, or too few of them.
    """
    if hosts:
        return share(_servers(hosts, token_file), learners.whole, "data.engine.hosts")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices == "auto":
        devices = [number for number in range(count) if number not in learners.devices] if learners.devices else ["cpu"]
        if not devices:
            raise ConfigError(
                "No GPU is left for the engines.",
                expected="fewer trainer.devices than the host has GPUs, or data.engine.devices or hosts",
                given=f"{count} GPUs, all of them the learner's",
                remedy="Lower trainer.devices, or take VLLMEngine, which shares the learner's GPU.",
            )
    names = [str(device).removeprefix("cuda:") for device in devices]
    unknown = [name for name in names if name != "cpu" and not (name.isdecimal() and int(name) < count)]
    if unknown or not names:
        raise ConfigError(
            "data.engine.devices names what is not there.",
            expected=f"`auto`, `cpu`, or numbers of this host's {count} GPUs",
            given=listed(unknown) or "an empty list",
            remedy="Correct it.",
        )
    both = [name for name in names if name != "cpu" and int(name) in learners.devices]
    if both:
        raise ConfigError(
            "An engine in another process would share a GPU with the learner.",
            expected="GPUs that the learner does not use",
            given=f"data.engine.devices with {listed(both)}, which trainer.devices has too",
            remedy="Leave data.engine.devices at auto, or take VLLMEngine, which lives in the learner's process.",
        )
    found = [Place(name if name == "cpu" else f"cuda:{name}") for name in names]
    return share(found, learners.local, "data.engine.devices")


def share(found: Sequence[T], process: tuple[int, int], key: str) -> list[T]:
    """Return those of a list that are one process's.

    Args:
        found: of all processes.
        process: its number, and how many there are.
        key: of the list.

    >>> share("abcde", (1, 2), "data.engine.devices")
    ['b', 'd']
    """
    number, size = process
    if len(found) < size and found != [Place("cpu")]:
        raise ConfigError(
            f"{key} has fewer engines than the learner has processes.",
            expected=f"at least {size}, one for each",
            given=len(found),
            remedy="Give more, or lower trainer.devices.",
        )
    return list(found[number::size]) or list(found)


def _servers(hosts: Sequence[str], token_file: str | None) -> list[Place]:
    wrong = [host for host in hosts if not re.fullmatch(r".+:\d+", host)]
    if wrong:
        raise ConfigError("data.engine.hosts is malformed.", expected="host:port", given=listed(wrong))
    if token_file is None:
        raise ConfigError(
            "data.engine.hosts needs the servers' token.",
            expected="data.engine.token_file, the file that `lit-qrl serve` was given",
            remedy="Set it.",
        )
    token = read_token(token_file)
    return [Place(host, token) for host in hosts]
