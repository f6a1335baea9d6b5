"""One `vllm serve`, as a run sees it: started or found, asked over HTTP, watched, and started again.

Every word is JSON. A server that ends, refuses a connection, answers that it failed (a status of 500 or more), or says
nothing for a while counts as dead.
"""

import http.client
import json
import os
import re
import secrets
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from lit_qrl.errors import ConfigError
from lit_qrl.rollout.engine import EngineDiedError
from lit_qrl.rollout.vllm.addresses import Address
from lit_qrl.rollout.vllm.guard import KEY
from lit_qrl.rollout.vllm.installation import installed_version, skew, versions

LAUNCH = """
import os, signal, subprocess, sys, threading
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
def end():
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=end, daemon=True).start()
code = child.wait()
os._exit(code if code >= 0 else 128 - code)
"""
"""A program that starts another, and ends it with whoever started this one, however that ends."""
SERVES = "LIT_QRL_SERVES"
"""Set where front and engine are of one server of ours, so that both have the plug-in."""
NEEDED = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_USE_RUST_FRONTEND": "0",
    SERVES: "1",
}
"""Without the first vLLM's server has no routes for weights, before which `guard.KeyGuard` asks for the key. The second
is 0 where a run's own process has had an engine; the third is a front that knows neither."""
NOT_INHERITED = ("VLLM_DIST_IDENT", "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME", "VLLM_DP_RANK_LOCAL")
"""What an engine in this process leaves in the environment as its own: no two processes may share it."""
CONNECT = 20.0
"""Seconds in which a server must accept a connection."""
AGAIN = 60.0
"""Seconds that a run waits for a server which it has not started and which was there: something may start it again."""
BEAT = 2.0
"""Seconds between two questions whether a server that draws is alive."""
PAUSE = 0.5
ERROR = re.compile(r"\b\w*(?:Error|Exception): .+")
"""An error in a server's log, from the name of its class on."""
LAST = 20_000
"""Characters at the end of that log among which a death is explained."""
LOG, SOCKET = "log", "socket"
LONGEST_PATH = 70
"""Bytes of a folder in which a socket can be, vLLM's own with a name of 36 among them: a path may have 107 in all."""


class Server:
    """Every question may raise `EngineDiedError`, after which `restart` and `open` begin anew.

    Args:
        address: of the server.
        silence: seconds without an answer after which it counts as dead.
    """

    def __init__(self, address: Address, silence: float) -> None:
        self.address, self.silence = address, silence
        self.arguments: Sequence[str] = ()
        """Of `vllm serve`, where the run starts it, but for address and port."""
        self.environment: Mapping[str, str] = {}
        """Of the process, beside the run's own."""
        self.timeout = 1800.0
        """Seconds that the start may take."""
        self.ready = False
        """True between `open` and a death."""
        self.version = -1
        """Of its weights."""
        self.done: set[str] = set()
        """Kinds of work that it has done since its start; the first of a kind may compile."""
        self._process: subprocess.Popen[bytes] | None = None
        self._url, self._key = urlsplit("" if address.started else address.name), address.key
        self._tls = ssl.create_default_context(cafile=address.certificates) if self._url.scheme == "https" else None
        self._connections: set[http.client.HTTPConnection] = set()
        self._lock = threading.RLock()
        self._cause, self._seen, self._starting = "", False, False
        self._folder: Path | None = None

    # ------------------------------------------------------------------------------------------------- start and end

    def start(self) -> None:
        """Start the process, where it is the run's; it gets ready while the caller goes on."""
        if not self.address.started or self._process is not None:
            return
        self._key, place = secrets.token_hex(32), tempfile.gettempdir()
        place = place if len(os.fsencode(place)) <= LONGEST_PATH else "/tmp"
        self._folder = Path(tempfile.mkdtemp(prefix="lit-qrl-serve-", dir=place))  # of this user alone
        inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        with (self._folder / LOG).open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", LAUNCH, *command(), *self.arguments, f"--uds={self._folder / SOCKET}"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**inherited, **self.environment, **NEEDED, KEY: self._key, "VLLM_RPC_BASE_PATH": place},
                start_new_session=True,
            )

    def open(self) -> dict[str, Any]:
        """Wait until the server is there, and return what its worker says of itself.

        Raises:
            ConfigError: where there is none that takes this run.
            EngineDiedError: where the process that was started does not come up, or one that was there is gone.
        """
        self.start()
        self._cause, self._starting = "", False
        patience = self.timeout if self.address.started else AGAIN if self._seen else 0.0
        self._await(time.monotonic() + patience)
        try:
            body = {"method": "connect_json"}
            found = self._ask("POST", "/collective_rpc", body, max(self.silence, 60.0))["results"][0]
        except (OSError, http.client.HTTPException, ValueError, LookupError, StatusError) as error:
            known = self.address.started or self._seen
            if isinstance(error, StatusError) and not (known and error.status >= 500):
                raise self._not_ours(error) from error
            raise self.died(_words(error)) from error
        differing = skew(versions(), found["versions"])
        if differing:
            raise ConfigError(
                f"The vLLM server at {self.address.name} was started from other versions than the run.",
                expected="the same on both sides",
                given=differing,
                remedy="Install the same packages, and start the server again.",
            )
        self._seen = self.ready = True
        return found

    def _await(self, until: float) -> None:
        while True:
            try:
                self._ask("GET", "/health", None, CONNECT)
                return
            except (OSError, http.client.HTTPException, StatusError) as error:
                # What the run has started answers when it is up: a refusal of its own is no start that takes long.
                ended = self._process is not None and (
                    isinstance(error, StatusError) or self._process.poll() is not None
                )
                if time.monotonic() < until and not ended:
                    time.sleep(PAUSE)
                    continue
                if self.address.started or self._seen:
                    raise self.died(f"it did not come up: {_words(error)}") from error
                raise ConfigError(
                    f"The vLLM server at {self.address.name} cannot be reached.",
                    expected=f"`lit-qrl serve` there, which answers within {CONNECT:g} s",
                    given=_words(error),
                    remedy="Start it, and see that no firewall stands between.",
                ) from error

    def _not_ours(self, error: "StatusError") -> ConfigError:
        if error.status == 401:
            return ConfigError(
                f"The vLLM server at {self.address.name} does not take this run's key.",
                expected="the key that the server was started with",
                given="another",
                remedy="Give both the same file: data.engine.token_file, and `lit-qrl serve --token_file`.",
            )
        return ConfigError(
            f"The server at {self.address.name} takes no weights of a run.",
            expected="`vllm serve` with the flags that `lit-qrl serve --show` prints",
            given=f"status {error.status} where its worker is asked: {error.said[:200]}",
            remedy="Start it by `lit-qrl serve`.",
        )

    def restart(self) -> None:
        """End what is left, and start a new process at once where it is the run's; again it changes nothing."""
        with self._lock:
            if not self._starting:
                self.close()
                self.start()
                self._starting = self._process is not None

    def close(self) -> None:
        """End the connections and, where it is the run's, the process and all that it started."""
        self.ready = self._starting = False
        self.done.clear()
        self.hang_up()
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def hang_up(self) -> None:
        """End every connection, also under threads that wait for an answer."""
        with self._lock:
            for connection in self._connections:
                if connection.sock is not None:
                    with suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)

    def died(self, why: str) -> EngineDiedError:
        """Note a death, of which whoever hears first finds out why; return it."""
        with self._lock:
            self.ready = False
            if not self._cause:
                self._cause = self._ended(why)
                self.hang_up()
            return EngineDiedError(self._cause)

    def _ended(self, why: str) -> str:
        if self._process is None:
            return f"The vLLM server at {self.address.name} is gone: {why}"
        status: Any = None
        with suppress(subprocess.TimeoutExpired):
            status = self._process.wait(2.0)
        status = 128 - status if status is not None and status > 128 else status  # as a shell tells of a signal
        assert self._folder is not None
        log = ""
        with suppress(OSError):
            log = (self._folder / LOG).read_text(errors="replace")
        errors = dict.fromkeys(reversed(ERROR.findall(log[-LAST:])))
        said = " | ".join(reversed(list(errors)[:2]))[:400]  # of an engine's process, then what the server made of it
        how = "is given up" if status is None else f"ended with status {status}"
        return f"The vLLM server on {self.address.name} {how}: {why}{f' ({said})' if said else ''}"

    # --------------------------------------------------------------------------------------------------------- asking

    def call(self, method: str, *args: str, timeout: float | None = None) -> dict[str, Any]:
        """Return what a method of the worker returns (`collective_rpc`)."""
        body = {"method": method, "args": list(args)}
        try:
            return self.post("/collective_rpc", body, timeout or self.silence)["results"][0]
        except LookupError as error:
            raise self.died(f"its worker's answer to {method} is empty") from error

    def post(self, path: str, body: Any = None, timeout: float | None = None, **query: Any) -> dict[str, Any]:
        """Return the answer of a route of vLLM's.

        Args:
            path: of the route.
            body: as JSON has it.
            timeout: seconds; None waits as long as it takes, while `watched` looks after the server.
            **query: what follows the path.
        """
        return self._hear("POST", f"{quote(path)}?{urlencode(query)}" if query else quote(path), body, timeout)

    def _hear(self, method: str, path: str, body: Any, timeout: float | None) -> dict[str, Any]:
        if self._cause:
            raise EngineDiedError(self._cause)
        try:
            return self._ask(method, path, body, timeout)
        except TimeoutError as error:
            raise self.died(f"no answer to {path} for {timeout:g} s") from error
        except (OSError, http.client.HTTPException, ValueError, StatusError) as error:
            if isinstance(error, StatusError) and error.status < 500:  # it refuses what was asked, and lives
                raise
            raise self.died(_words(error)) from error

    def _ask(self, method: str, path: str, body: Any, timeout: float | None) -> dict[str, Any]:
        connection = self._connection()
        with self._lock:
            self._connections.add(connection)
        try:
            if self.address.started:  # no other user opens this socket, and no other server can have taken it
                connection.sock = socket.socket(socket.AF_UNIX)
                # Where many connect at once they wait for their turn: with a timeout of Python's they would not.
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(CONNECT), 0))
                connection.sock.connect(f"{self._folder}/{SOCKET}")
            else:
                connection.connect()
            connection.sock.settimeout(timeout)
            headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            said = answer.read()
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()
        if answer.status != 200:
            raise StatusError(path, answer.status, said.decode(errors="replace"))
        return json.loads(said) if said.strip() else {}

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._url.hostname or "localhost", self._url.port
        if self._tls is None:
            return http.client.HTTPConnection(host, port, timeout=CONNECT)
        return http.client.HTTPSConnection(host, port, timeout=CONNECT, context=self._tls)

    @contextmanager
    def watched(self, kind: str) -> Iterator[None]:
        """Look after the server inside: where its loop says nothing for `silence`, whoever waits hears of its death.

        Args:
            kind: of the work; while the loop does its first of a kind, which may take long, the front is asked instead.
        """
        over, first = threading.Event(), kind not in self.done

        def watch() -> None:
            with suppress(EngineDiedError, StatusError):
                while not over.wait(BEAT):
                    if first:
                        self._hear("GET", "/health", None, self.silence)
                    else:
                        self.call("check_health")  # vLLM's own, which its loop answers

        thread = threading.Thread(target=watch, name=f"watch {self.address.name}", daemon=True)
        thread.start()
        try:
            yield
            self.done.add(kind)
        finally:
            over.set()


def command() -> list[str]:
    """Return `vllm serve` as a command, which the model's folder follows; the CPU build lacks that of this name."""
    found = installed_version()
    if found is not None and found[1]:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]


class StatusError(RuntimeError):
    """An answer other than 200."""

    def __init__(self, path: str, status: int, said: str) -> None:
        super().__init__(f"{path} answered {status}: {said[:500]}")
        self.status, self.said = status, said


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
