"""Where a run has vLLM's servers: on devices of its own host, or elsewhere with a key; and which prompts each draws."""

import logging
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lit_qrl.errors import ConfigError, listed
from lit_qrl.rollout.engine import Learners

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Address:
    """Where a server runs.

    Args:
        name: `cpu` or `cuda:1` for one that the run starts, else its address, `http://host:port` or `https://…`.
        key: that it asks for; the run makes one for those that it starts.
        certificates: file of those that its TLS is trusted by; None are the system's.
    """

    name: str
    key: str = ""
    certificates: str | None = None

    @property
    def started(self) -> bool:
        """True where the run starts the server."""
        return "://" not in self.name


def visible(*devices: int) -> str:
    """Return what CUDA_VISIBLE_DEVICES is for a process that sees these devices of this one, in this order.

    >>> import unittest.mock
    >>> with unittest.mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="2,3"):
    ...     visible(1, 0)
    '3,2'
    """
    here = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return ",".join(here[n] if here else str(n) for n in dict.fromkeys(devices))


def address_towards(host: str) -> str:
    """Return the address of this host on the way to another, by which that one reaches it; nothing is sent.

    >>> address_towards("127.0.0.1")
    '127.0.0.1'
    """
    family, kind, *_, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(there)
        return sock.getsockname()[0]


def addresses(
    devices: str | Sequence[int | str],
    hosts: Sequence[str] | None,
    token_file: str | None,
    learners: Learners,
    certificates: str | None = None,
) -> list[Address]:
    """Return where this process of the learner has its servers.

    Args:
        devices: `auto`, or numbers of GPUs and `cpu`.
        hosts: addresses of servers, instead of devices.
        token_file: with their key.
        learners: the processes that share them.
        certificates: by which theirs are trusted.

    Raises:
        ConfigError: for a device that is not there or is the learner's, a server without a key, or too few of them.
    """
    if hosts:
        return of_process(_servers(hosts, token_file, certificates), learners.whole, "data.engine.hosts")
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
    if both and (learners.local[1] > 1 or set(names) != set(both)):
        raise ConfigError(
            "Some servers would share a GPU with the learner.",
            expected="GPUs that the learner does not use; or, of a learner in one process, its GPU alone",
            given=f"data.engine.devices: {listed(names)}, where the learner uses {listed(map(str, learners.devices))}",
            remedy="Leave data.engine.devices at auto, or take VLLMEngine, which lives in the learner's process.",
        )
    found = [Address(name if name == "cpu" else f"cuda:{name}") for name in names]
    return of_process(found, learners.local, "data.engine.devices")


def of_process(found: Sequence[Address], process: tuple[int, int], key: str) -> list[Address]:
    """Return those of a list that are one process's.

    Args:
        found: of all processes.
        process: its number, and how many there are.
        key: of the list.

    >>> found = [Address("cpu"), Address("cuda:1"), Address("cuda:2")]
    >>> [one.name for one in of_process(found, (1, 2), "data.engine.devices")]
    ['cuda:1']
    """
    number, size = process
    if len(found) < size and [one.name for one in found] != ["cpu"]:
        raise ConfigError(
            f"{key} has fewer engines than the learner has processes.",
            expected=f"at least {size}, one for each",
            given=len(found),
            remedy="Give more, or lower trainer.devices.",
        )
    return list(found[number::size]) or list(found)


def _servers(hosts: Sequence[str], token_file: str | None, certificates: str | None) -> list[Address]:
    named = [host if "://" in host else f"http://{host}" for host in hosts]
    wrong = [one for one in named if not re.fullmatch(r"https?://.+:\d+", one)]
    if wrong:
        expected = "host:port or https://host:port"
        raise ConfigError("data.engine.hosts is malformed.", expected=expected, given=listed(wrong))
    if token_file is None:
        raise ConfigError(
            "data.engine.hosts needs the servers' token.",
            expected="data.engine.token_file, the file that `lit-qrl serve` was given",
            remedy="Set it.",
        )
    key = read_key(token_file)
    return [Address(address, key, certificates) for address in named]


def read_key(path: str | Path) -> str:
    """Return the key in a file.

    Raises:
        ConfigError: where there is none.
    """
    try:
        key = Path(path).read_text().strip()
        why = f"{path}, which is empty"
    except OSError as error:
        key, why = "", f"{path}: {error.strerror or error}"
    if not key:
        raise ConfigError(
            "The key of vLLM's server cannot be read.",
            expected="a file with one line that run and server share, readable by its owner alone",
            given=why,
            remedy="Write one by `(umask 077; openssl rand -hex 32 > token)`, and give both its path.",
        )
    if Path(path).stat().st_mode & 0o004:
        log.warning("Everybody on this host can read the key in %s; take that away by: chmod 600 %s", path, path)
    return key
