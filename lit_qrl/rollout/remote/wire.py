"""The connection between a run and an engine's server: who may speak, and whether both are of one version.

Both sides prove that they know the token (`multiprocessing.connection`'s challenge by HMAC); the token itself never
travels. Then each says its versions in JSON: no object is unpickled of a peer that was not admitted. What follows is
not encrypted.
"""

import importlib.metadata
import json
import platform
import socket
import struct
import time
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from lit_qrl import __version__
from lit_qrl.errors import ConfigError

PROTOCOL = 2
CONNECT = 25.0
"""Seconds in which a server must accept, know the token, and say its versions; an unreachable host is named then."""
AGAIN = 60.0
"""Seconds that a run waits for a server which was there and listens no more: something may start it again."""
PAUSE = 0.5
ADMIT = 10.0
"""Seconds in which a client must do the same; until then no other is heard."""
COMPARED = ("torch", "transformers", "vllm")
"""Distributions whose versions must be the same on both sides where both have them."""
SILENCE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
"""Of a host that is gone no connection is closed: after 30 s without an answer it counts as gone."""


class RefusedClientError(Exception):
    """A client that is not served: a stranger, one of another version, or one that says nothing."""


def versions() -> dict[str, str]:
    """Return what must agree on both sides, by name."""
    found = {"protocol": str(PROTOCOL), "lit-qrl": __version__, "python": platform.python_version().rpartition(".")[0]}
    for name in COMPARED:
        for distribution in (name, f"{name}-cpu"):
            with suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(distribution)
    return found


def skew(client: dict[str, str], server: dict[str, str]) -> str:
    """Return which versions differ, as part of a sentence; empty where none does.

    >>> skew({"torch": "2.11.0", "vllm": "0.26.0"}, {"torch": "2.13.0"})
    'torch 2.11.0 in the run and 2.13.0 in the server'
    """
    pairs = ((name, client[name], server[name]) for name in client if name in server)
    return ", ".join(
        f"{name} {mine} in the run and {other} in the server" for name, mine, other in pairs if mine != other
    )


def read_token(path: str | Path) -> bytes:
    """Return the token in a file.

    Raises:
        ConfigError: where there is none.
    """
    try:
        token = Path(path).read_text().strip()
    except OSError as error:
        token, why = "", f"{path}: {error.strerror or error}"
    else:
        why = f"{path}, which is empty"
    if not token:
        raise ConfigError(
            "The token of the engine's server cannot be read.",
            expected="a file with one line that run and server share, readable by its owner alone",
            given=why,
            remedy="Write one by `openssl rand -hex 32 > token`, and give both its path.",
        )
    return token.encode()


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        ConfigError: where the address cannot be had, as when the port is in use.
    """
    try:
        return socket.create_server((host, port))
    except (OSError, OverflowError) as error:  # the latter for a port beyond 65535
        raise ConfigError(
            "The engine's server cannot listen there.",
            expected="an address of this host and a port that nobody uses",
            given=f"{host}:{port} ({getattr(error, 'strerror', None) or error})",
            remedy="Choose another port, or 0 for any; end the server that has it.",
        ) from error


def admit(accepted: socket.socket, token: bytes) -> Connection:
    """Return the connection to a client that knows the token and has the server's versions.

    Raises:
        RefusedClientError: for any other.
    """
    connection = _connection(accepted, ADMIT)
    try:
        deliver_challenge(connection, token)
        answer_challenge(connection, token)
        theirs = json.loads(connection.recv_bytes(4096))
        differing = skew(theirs, versions())
        connection.send_bytes(json.dumps({"refused": differing, **versions()}).encode())
        if differing:
            raise RefusedClientError(differing)
        _patient(connection)
    except (OSError, EOFError, ValueError, AttributeError, AuthenticationError) as error:
        connection.close()
        raise RefusedClientError(f"{type(error).__name__}: {error}") from error
    except RefusedClientError:
        connection.close()
        raise
    return connection


def connect(host: str, port: int, token: bytes, patience: float = 0.0) -> Connection:
    """Return the connection to a server.

    Args:
        host: where it listens.
        port: where it listens.
        token: that it knows.
        patience: seconds in which it may begin to listen.

    Raises:
        ConfigError: where nobody listens or answers in time, the token is another, or versions differ.
    """
    place, until = f"{host}:{port}", time.monotonic() + patience
    while True:
        try:
            reached = socket.create_connection((host, port), timeout=CONNECT)
            break
        except OSError as error:
            if isinstance(error, ConnectionRefusedError) and time.monotonic() < until:
                time.sleep(PAUSE)
                continue
            raise ConfigError(
                f"The engine's server at {place} cannot be reached.",
                expected=f"`lit-qrl serve` there{f', within {patience:g} s' if patience else ''}",
                given=error.strerror or str(error),
                remedy="Start it, and see that no firewall stands between.",
            ) from error
    connection = _connection(reached, CONNECT)
    try:
        answer_challenge(connection, token)
        deliver_challenge(connection, token)
        connection.send_bytes(json.dumps(versions()).encode())
        differing = json.loads(connection.recv_bytes(4096))["refused"]
        _patient(connection)
    except (AuthenticationError, OSError, EOFError, ValueError, KeyError, AssertionError) as error:
        connection.close()
        raise _not_admitted(place, error) from error
    if differing:
        connection.close()
        raise ConfigError(
            f"The engine's server at {place} was started from other versions than the run.",
            expected="the same on both sides",
            given=differing,
            remedy="Install the same packages, and start the server again.",
        )
    return connection


def _not_admitted(place: str, error: Exception) -> ConfigError:
    """Return what is said where a server does not know the token, or is none of ours."""
    # To what is no challenge Python 3.11 says AssertionError, and later ones that the protocol is another.
    if isinstance(error, AuthenticationError) and "Protocol error" not in str(error):
        return ConfigError(
            f"The engine's server at {place} does not take this run's token.",
            expected="the token that the server was started with",
            given="another",
            remedy="Give both the same data.engine.token_file.",
        )
    given = f"{type(error).__name__}: {error}"
    if isinstance(error, (EOFError, ConnectionError)):
        given = "a connection that was closed at once"
    elif isinstance(error, BlockingIOError):  # what the system says of a limit that has passed
        given = "no word"
    return ConfigError(
        f"What answers at {place} within {CONNECT:g} s is no free engine's server.",
        expected="`lit-qrl serve`, which serves one run at a time",
        given=given,
        remedy="See that the address is the server's; wait until the run that it serves has ended, or start another "
        "server.",
    )


def _connection(reached: socket.socket, seconds: float) -> Connection:
    """Return a connection whose every message must come within `seconds`."""
    reached.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    reached.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in SILENCE:
        reached.setsockopt(socket.IPPROTO_TCP, option, value)
    _limit(reached, seconds)
    return Connection(reached.detach())


def _patient(connection: Any) -> None:
    """Let messages take as long as they take: an engine may draw for hours."""
    held = socket.socket(fileno=connection.fileno())
    try:
        _limit(held, 0.0)
    finally:
        held.detach()


def _limit(held: socket.socket, seconds: float) -> None:
    held.settimeout(None)  # the descriptor itself blocks, and the system ends what takes too long
    held.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), 0))
