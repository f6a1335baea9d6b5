"""The processes of one run: whether they were given the same settings, and what ends the others when one is gone."""

import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from lit_qrl.errors import ConfigError, listed

ENDED, FAILED, LOST, SIGNAL = b"e", b"f", b"l", b"s"
"""What a process says: that it ends as it should, by an error, that another one is gone, that one has got a signal."""
GRACE = 20.0
"""Seconds in which a process may end by the same error as another, before that one's is told for all."""
MET = threading.Event()
"""Set when the processes have met: from then on each knows what becomes of the others."""
MOMENT = 5.0
"""Seconds that a process which fails before it has met the others gives the first one to say why, and to end it."""
CONNECT = 60.0
SILENCE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
"""Of a host that is gone no connection is closed: after 30 s without an answer it counts as gone."""


def check_same(settings: Sequence[Mapping[str, Any]]) -> None:
    """Raise `ConfigError` where the processes of a run were started with different settings.

    Args:
        settings: of each rank, by their keys.

    >>> check_same([{"data.group_size": 4}, {"data.group_size": 4}])
    """
    first = settings[0]
    for rank, other in enumerate(settings):
        differing: list[str] = []
        for key in sorted(key for key in first.keys() | other.keys() if first.get(key) != other.get(key)):
            if not any(key.startswith(f"{above}.") for above in differing):  # of a class that differs, the class alone
                differing.append(key)
        if differing:
            shown = [f"{key} {first.get(key)} on rank 0 and {other.get(key)} on rank {rank}" for key in differing]
            raise ConfigError(
                "The processes of the run were started with different settings.",
                expected="the same on every rank",
                given=listed(shown, 3),
                remedy="Start all of them with one command and the same configuration files.",
            )


def require_free_port(port: int) -> None:
    """Raise `ConfigError` when another program listens where the first process is to wait for the others.

    They would talk to it, and wait for minutes.

    Args:
        port: of this host.
    """
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the end of a run before this one does not count
        try:
            trial.bind(("", port))
        except OSError as error:
            raise ConfigError(
                "The processes of the run cannot meet: their port is in use.",
                expected="a port that nobody listens on",
                given=f"MASTER_PORT {port} ({error.strerror})",
                remedy="Set MASTER_PORT to another one, or leave it out where one machine starts all of them.",
            ) from error


class PeerWatch:
    """Tells when another process of the run ends before this one, at once and whatever this one is waiting for.

    Every process holds a connection to the first one, which the system closes when either is killed. Nothing is sent
    while all live, so a process that computes for long is not taken for dead.

    Args:
        gone: called in a thread of its own with a rank, its last words, which are empty where it was killed, and the
            exit status that it gives itself, 0 where it does not say.
        signalled: called there with the number of a signal that another process got.
    """

    def __init__(self, gone: Callable[[int, str, int], None], signalled: Callable[[int], None] | None = None) -> None:
        self._gone, self._signalled = gone, signalled
        self._peers: dict[int, socket.socket] = {}
        self._thread: threading.Thread | None = None
        self._own_end, self._decided = threading.Event(), threading.Event()

    def start(self, rank: int, size: int, broadcast: Callable[[Any], Any]) -> None:
        """Connect the processes; a second call before `stop` changes nothing.

        Args:
            rank: of this process.
            size: how many there are.
            broadcast: gives an object of the first process to all.
        """
        if self._thread is not None:
            return
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        if rank == 0:
            local = host in ("127.0.0.1", "localhost")
            with socket.create_server(("127.0.0.1" if local else "", 0)) as server:
                token = secrets.token_hex(16)
                broadcast([server.getsockname()[1], token])
                server.settimeout(CONNECT)
                while len(self._peers) < size - 1:
                    self._admit(server.accept()[0], token.encode())
        else:
            port, token = broadcast(None)
            connection = socket.create_connection((host, port), timeout=CONNECT)
            connection.sendall(token.encode() + struct.pack("!I", rank))
            self._peers[0] = connection
        for connection in self._peers.values():
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in SILENCE:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._own_end.clear()
        self._decided.clear()
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()

    def _admit(self, connection: socket.socket, token: bytes) -> None:
        connection.settimeout(CONNECT)
        with suppress(OSError):
            hello = _exactly(connection, len(token) + 4)
            if secrets.compare_digest(hello[: len(token)], token):
                self._peers[struct.unpack("!I", hello[len(token) :])[0]] = connection
                return
        connection.close()

    def stop(self) -> None:
        """End as a process does whose work is done."""
        self._say(ENDED, 0, "")
        self._close()

    def fail(self, words: str, status: int = 0) -> None:
        """Tell the others that this process ends by an error of its own, and let the first one speak before it does.

        What started the processes may end all of them with the first that ends.

        Args:
            words: a paragraph that says why.
            status: with which it exits, where the others shall, too.
        """
        self._own_end.set()
        self._say(FAILED, 0, words, status)
        first = self._peers.get(0)
        if first is not None and self._thread is not None:
            self._thread.join(GRACE)
            with suppress(OSError):
                first.settimeout(1.25 * GRACE)  # it may end by the same error, or waits so long to tell this one
                while first.recv(4096):
                    pass

    def tell_signal(self, number: int) -> None:
        """Tell the others of a signal that this process got; a handler may call this.

        Args:
            number: of the signal.
        """
        self._say(SIGNAL, 0, "", number)

    def wait(self, seconds: float) -> None:
        """Give the thread time to find out which process is gone: a broken collective says less than that."""
        self._decided.set()  # this process has no error of its own
        if self._thread is not None:
            self._thread.join(seconds)

    def _close(self) -> None:
        self._own_end.set()
        self._decided.set()
        for connection in self._peers.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5)
        for connection in self._peers.values():
            connection.close()
        self._peers, self._thread = {}, None

    def _say(self, kind: bytes, rank: int, words: str, status: int = 0) -> None:
        for connection in list(self._peers.values()):
            self._send(connection, kind, rank, words, status)

    def _send(self, connection: socket.socket, kind: bytes, rank: int, words: str, status: int) -> None:
        text = words.encode()[:4000]
        with suppress(OSError):
            connection.sendall(kind + struct.pack("!III", rank, status, len(text)) + text)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._peers.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while selector.get_map() and not self._own_end.is_set():
                for key, _ in selector.select(timeout=1.0):
                    said = self._said(key.fileobj, key.data)
                    if said[0] == SIGNAL:
                        for other, connection in self._peers.items():
                            if other not in (0, key.data):  # they hear each other through the first one alone
                                self._send(connection, SIGNAL, 0, "", said[2])
                        if self._signalled is not None:
                            self._signalled(said[2])
                        continue
                    selector.unregister(key.fileobj)
                    lost = self._heard(key.data, *said)
                    if lost is not None and not self._own_end.is_set():
                        self._say(LOST, *lost)
                        self._gone(*lost)
                        return

    def _said(self, connection: Any, rank: int) -> tuple[bytes, int, int, str]:
        """Return the next message of a process: its kind, the rank and the status that it is about, and words."""
        try:
            kind, (about, status, size) = _exactly(connection, 1), struct.unpack("!III", _exactly(connection, 12))
            return kind, about, status, _exactly(connection, size).decode(errors="replace")
        except OSError:
            return LOST, rank, 0, ""

    def _heard(self, rank: int, kind: bytes, about: int, status: int, words: str) -> tuple[int, str, int] | None:
        """Return which process is gone, its last words and its status, or None where one has ended as it should."""
        if kind == ENDED:
            return None
        if kind == LOST:
            return about, words, status
        # Most errors are the same on all ranks: then this process ends by its own.
        self._decided.wait(GRACE)
        return None if self._own_end.is_set() else (rank, words, status)


def _exactly(connection: socket.socket, size: int) -> bytes:
    """Return so many bytes; `OSError` where the connection is closed before."""
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise ConnectionError("closed")
        found += part
    return found


def silent(rank: int) -> bool:
    """Return whether a process leaves it to the first one to say why it ends.

    Before they have met it waits a moment, in which the first one may end by the same error; what started both ends
    this one too then.

    Args:
        rank: of this process.

    >>> silent(0)
    False
    """
    if rank == 0 or MET.is_set():
        return rank > 0
    parent, until = os.getppid(), time.monotonic() + MOMENT
    while time.monotonic() < until:
        if os.getppid() != parent:
            return True
        time.sleep(0.1)
    return False
