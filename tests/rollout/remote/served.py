"""A server in a thread of the test's own process, and engines that are quick to make."""

import socket
import threading
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import torch

from lit_qrl import formats
from lit_qrl.network.linears import quantizable_linears
from lit_qrl.network.stream import weight_stream
from lit_qrl.receipts.ledger import SentLedger, compare, compare_columns, compare_read_back
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.engine import EngineDiedError, SamplerSpec
from lit_qrl.rollout.remote.engine import RemoteEngine
from lit_qrl.rollout.remote.server import serve
from lit_qrl.rollout.remote.wire import listen
from lit_qrl.types import SamplingParams
from tests.networks import build_network

TOKEN = b"between these two"
SAMPLING = SamplingParams(max_tokens=6)
PROMPTS = [[3, 4, 5], [6, 7], [8], [9, 10, 11, 12], [13, 14]]


class Mortal(TransformersEngine):
    """Dies in its first draw, as vLLM does when a step fails, once the switch is on."""

    switch = False

    def generate(self, *args, **kwargs):
        if Mortal.switch:
            Mortal.switch = False
            raise EngineDiedError("The engine died as the test wants.")
        return super().generate(*args, **kwargs)


@contextmanager
def server(token=TOKEN, port=0):
    """Give `host:port` of a server that serves runs one after the other."""
    listener = listen("127.0.0.1", port)

    def until_closed():
        with suppress(OSError):
            serve(listener, token, torch.device("cpu"))

    threading.Thread(target=until_closed, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@contextmanager
def remote(tmp_path, servers=1, engine=None, network=None, sampling=SAMPLING, in_flight="none", **options):
    """Give a remote engine over servers in threads, set up for a tiny network, and that network."""
    (tmp_path / "token").write_text(TOKEN.decode() + "\n")
    network = network or build_network()
    with server() as one, server() as two:
        held = RemoteEngine(
            engine or TransformersEngine(),
            hosts=[one, two][:servers],
            token_file=str(tmp_path / "token"),
            **options,
        )
        spec = SamplerSpec(sampling=sampling, in_flight=in_flight)
        held.validate(spec)
        held.setup(spec, SimpleNamespace(network=network))
        yield held, network
        held.close()


def format_of(name):
    return None if name is None else formats.get(name, **({"group_size": 16} if name == "int4_group" else {}))


def stream_of(network, format):
    named = ((name, parameter.detach()) for name, parameter in network.named_parameters())
    return weight_stream(named, format, list(quantizable_linears(network)))


def publish(engine, network, name=None, version=0, wire=lambda stream: stream):
    """Publish in a format and return (faults, report)."""
    format = format_of(name)
    sent = SentLedger(version, format)
    stream = engine.arranged(stream_of(network, format))
    report = engine.load_weights(wire(sent.watch(stream)), format, version)
    faults = compare(sent, report.received)
    if hasattr(engine, "read_columns"):
        faults += compare_columns(sent, engine.read_columns, exact=format is None)
    return faults + compare_read_back(sent, engine.read_back, list(sent.receipts())[::3]), report


def embedded(network, name=None):
    """An engine in this process that holds the same."""
    engine = TransformersEngine()
    engine.setup(SamplerSpec(sampling=SAMPLING), SimpleNamespace(network=network))
    publish(engine, network, name)
    return engine
