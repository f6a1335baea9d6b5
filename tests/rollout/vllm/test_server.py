"""What a run says of servers that are not there, not its own, silent, or gone; a stand-in speaks HTTP."""

import ast
import json
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lit_qrl.errors import ConfigError
from lit_qrl.loop.turns import Conversations
from lit_qrl.receipts.ledger import ReceivedLedger
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.engine import EngineDiedError, Learners, Pauses, SamplerSpec
from lit_qrl.rollout.vllm import client, guard, requests, server, ways
from lit_qrl.rollout.vllm.addresses import Address, addresses, read_key
from lit_qrl.rollout.vllm.base import VLLM
from lit_qrl.rollout.vllm.client import RemoteVLLMEngine, between, completion_of
from lit_qrl.rollout.vllm.installation import versions
from lit_qrl.rollout.vllm.server import Server
from lit_qrl.types import SamplingParams
from tests import served_stand_in
from tests.loop.test_turns import Echo
from tests.vllm_engines import tiny_network

KEY = "between these two"


@contextmanager
def standing_in(answer):
    """Give the address of a server; `answer` gets a path and a body, and returns a status and what JSON says."""

    class Handler(served_stand_in.Handler):
        key = KEY

        def answered(self, body):
            return answer(self.path, body)

    held = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    held.daemon_threads = True
    threading.Thread(target=held.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{held.server_port}"
    finally:
        held.shutdown()
        held.server_close()


def connected(**changes):
    return {"results": [{"versions": versions() | changes, "config": {}, "longest": 9, "workers": 1}]}


@pytest.mark.parametrize(
    ("key", "answer", "named"),
    [
        ("another", lambda path, body: (200, connected()), "does not take this run's key"),
        (KEY, lambda path, body: (404, {}), "takes no weights of a run.*lit-qrl serve"),
        (KEY, lambda path, body: (500, {}), "takes no weights of a run"),
        (KEY, lambda path, body: (200, connected(torch="1.0")), "other versions than the run.*torch"),
    ],
)
def test_what_is_no_server_of_the_run_is_one_paragraph(key, answer, named):
    with standing_in(answer) as address, pytest.raises(ConfigError, match=named):
        Server(Address(address, key), silence=5).open()


def test_a_server_that_nobody_started_is_named_and_one_that_was_there_is_dead(monkeypatch):
    monkeypatch.setattr(server, "AGAIN", 0.0)
    one = Server(Address("http://127.0.0.1:9", KEY), silence=5)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9 cannot be reached.*Connection refused"):
        one.open()
    one._seen = True
    with pytest.raises(EngineDiedError, match="did not come up: Connection refused"):
        one.open()


def test_one_that_was_there_and_fails_when_it_is_asked_again_is_dead():
    with standing_in(lambda path, body: (500, {})) as address:
        one = Server(Address(address, KEY), silence=5)
        one._seen = True
        with pytest.raises(EngineDiedError, match=r"is gone: .*answered 500"):
            one.open()


def test_one_that_the_run_started_and_that_says_it_failed_is_not_waited_for(monkeypatch):
    def asked(self, method, path, body, timeout):
        raise server.StatusError(path, 503, "the engine is dead")

    monkeypatch.setattr(Server, "_ask", asked)
    one = Server(Address("cpu"), silence=5)
    one._process = SimpleNamespace(poll=lambda: None, wait=lambda seconds: 1)
    one._folder = Path()
    with pytest.raises(EngineDiedError, match=r"did not come up: .*answered 503"):
        one.open()


def test_silence_in_the_middle_of_a_draw_is_a_death_of_all_that_wait(monkeypatch):
    monkeypatch.setattr(server, "BEAT", 0.05)
    over = threading.Event()

    def answer(path, body):
        over.wait(20)
        return 200, {}

    with standing_in(answer) as address:
        one, start = Server(Address(address, KEY), silence=0.5), time.monotonic()
        one.done.add("draw")
        with (
            pytest.raises(EngineDiedError, match=r"is gone: no answer to /collective_rpc for 0\.5 s"),
            one.watched("draw"),
        ):
            one.post("/inference/v1/generate", {})
        assert time.monotonic() - start < 5
        over.set()
    with pytest.raises(EngineDiedError, match="no answer"):  # until it is opened again
        one.post("/resume")


def test_a_server_that_fails_is_dead_and_one_that_refuses_is_not():
    with standing_in(lambda path, body: (int(path[1:]), {})) as address:
        one = Server(Address(address, KEY), silence=5)
        with pytest.raises(server.StatusError, match="answered 400"):
            one.post("/400")
        with pytest.raises(EngineDiedError, match="answered 500"):
            one.post("/500")
    with standing_in(lambda path, body: (200, {})) as address, pytest.raises(EngineDiedError, match="to ask is empty"):
        Server(Address(address, KEY), silence=5).call("ask")


def test_nothing_that_comes_over_the_network_is_unpickled():
    """Read of the code: no module on either side of the connection names what unpickles, or allows vLLM to."""
    folder = Path(client.__file__).parent
    for name in ("client", "server", "ways", "guard", "transfer", "worker"):
        text = (folder / f"{name}.py").read_text()
        tree = ast.parse(text)
        imported = {one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names}
        imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not imported & {"pickle", "cloudpickle", "multiprocessing", "marshal", "shelve", "dill"}, name
        called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not called & {"torch.load", "eval", "exec", "pickle.loads"}, name
        assert "INSECURE" not in text, name
        assert text.count("np.load(") == text.count("allow_pickle=False"), name


@pytest.mark.parametrize("given", [b"Bearer between these two", b"", b"Bearer another"])
def test_every_route_asks_for_the_key(given, monkeypatch):
    monkeypatch.setenv(guard.KEY, KEY)
    passed, sent = [], []

    async def app(scope, receive, send):
        passed.append(scope["path"])

    async def send(message):
        sent.append(message)

    for path in ("/update_weights", "/collective_rpc", "/health"):
        scope = {"type": "http", "path": path, "headers": [(b"authorization", given)]}
        with pytest.raises(StopIteration):
            guard.KeyGuard(app)(scope, None, send).__await__().send(None)
    known = given == b"Bearer between these two"
    assert passed == (["/update_weights", "/collective_rpc", "/health"] if known else ["/health"])
    assert [one["status"] for one in sent if "status" in one] == ([] if known else [401, 401])


def test_files_carry_every_dtype_and_are_gone_when_they_were_taken(tmp_path):
    sender = ways.Files(str(tmp_path))
    stack = torch.arange(12.0).reshape(3, 4)
    sent = [
        ("b", stack[1]),
        ("a", torch.ones(2, 3).to(torch.float8_e4m3fn)),
        ("c", torch.tensor([3], dtype=torch.int64)),
        ("d", torch.ones(4, dtype=torch.bfloat16).view(2, 2).T),
    ]
    packed = json.loads(json.dumps(sender.pack(sent)))
    found = list(ways.receiver(None, torch.device("cpu"), 0)(packed))
    assert [name for name, _ in found] == ["b", "a", "c", "d"]
    for (_, one), (_, other) in zip(sent, found, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.float(), other.float())
    sender.taken(packed)
    assert not list(sender.folders[0].glob("*.safetensors"))
    sender.close()
    assert not list(tmp_path.iterdir())


@pytest.fixture
def two_places(tmp_path, monkeypatch):
    """Return a place for files in memory, and one on a disk, with what each has free."""
    (memory := tmp_path / "memory").mkdir()
    (disk := tmp_path / "disk").mkdir()
    free = {memory: 2**30, disk: 2**30}
    monkeypatch.setattr(ways, "MEMORY", memory)
    monkeypatch.setattr(ways.tempfile, "gettempdir", lambda: str(disk))
    monkeypatch.setattr(ways.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[folder.parent]))
    return free


def test_a_part_that_finds_no_room_in_memory_lies_on_a_disk(two_places):
    (memory, disk), part = two_places, [("a", torch.zeros(2**20))]
    sender = ways.Files()
    places = [Path(sender.pack(part)["file"]).parents[1]]
    two_places[memory] = 19 * 2**20
    places += [Path(sender.pack(part)["file"]).parents[1]]
    assert places == [memory, disk]
    two_places[disk] = 2**20
    with pytest.raises(ConfigError, match=r"20 MiB(.|\n)*19 MiB in .*memory, 1 MiB in .*disk"):
        sender.pack(part)
    sender.close()
    assert not [*memory.iterdir(), *disk.iterdir()]


def test_what_a_killed_run_left_goes_and_what_another_holds_stays(two_places):
    other, (memory, _) = ways.Files(), two_places
    (left := memory / f"{ways.PARTS}left").mkdir()
    (left / "1.safetensors").touch()
    (young := memory / f"{ways.PARTS}young").mkdir()
    for folder in (left, *other.folders):
        os.utime(folder, (0, 0))
    ways.Files().close()
    assert sorted(memory.iterdir()) == sorted([young, other.folders[0]])


def test_a_name_that_comes_twice_begins_another_part():
    parts = list(ways.chunks(iter([("a", torch.zeros(2)), ("b", torch.zeros(2)), ("a", torch.ones(2))])))
    assert [[name for name, _ in part] for part in parts] == [["a", "b"], ["a"]]


def told(value=1, **changes):
    receipts = {"a": [[2], "float32", value, True]}
    return {"version": 3, "bytes": 8, "faults": [], "unread": [], "twice": [], "receipts": receipts} | changes


def test_a_difference_between_servers_is_a_fault():
    ledgers = [
        ReceivedLedger.heard(one)
        for one in (told(), told(2), told(twice=["a"], faults=[["gemm", "b", ""]], receipts={}))
    ]
    found = {(one.kind, one.name) for one in between(ledgers, ["one", "two", "three"])}
    assert found == {("different", "a"), ("missing", "a"), ("gemm", "b")}
    assert ledgers[2].repeated == ["a"]
    assert between([ReceivedLedger.heard(told()), ReceivedLedger.heard(told())], ["one", "two"]) == []


def test_a_completion_says_which_weights_drew_it_where_the_server_does():
    choice = {"token_ids": [4, 5], "finish_reason": "stop", "logprobs": {"content": [{"logprob": -1.0}] * 2}}
    one = completion_of(choice, 7)
    assert (one.version, one.versions, one.finish_reason) == (7, None, "stop")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sleep_level": 1}, "does not know or say sleep_level"),
        ({"batch_invariant": True}, "does not know or say batch_invariant"),
        ({"tensor_parallel_size": 2}, "does not know or say tensor_parallel_size"),
        ({"hosts": ["node:1"], "transfer": "ipc"}, "CUDA handles of another host"),
    ],
)
def test_what_the_server_does_not_do_is_refused_by_name(options, named):
    with pytest.raises(ConfigError, match=named):
        RemoteVLLMEngine(**options)


def test_it_stands_still_between_two_steps_as_no_engine_of_this_process_does():
    assert isinstance(RemoteVLLMEngine(), Pauses)
    assert not isinstance(TransformersEngine(), Pauses)


def test_addresses_and_their_key(tmp_path, caplog):
    (tmp_path / "token").write_text(f"{KEY}\n")
    for mode, told in ((0o640, False), (0o644, True)):
        (tmp_path / "token").chmod(mode)
        read_key(tmp_path / "token")
        assert (f"chmod 600 {tmp_path / 'token'}" in caplog.text) is told
    found = addresses("auto", ["node:80", "https://other:443"], str(tmp_path / "token"), Learners())
    assert [(one.name, one.key) for one in found] == [("http://node:80", KEY), ("https://other:443", KEY)]
    assert not any(one.started for one in found)
    with pytest.raises(ConfigError, match="malformed"):
        addresses("auto", ["node"], str(tmp_path / "token"), Learners())
    with pytest.raises(ConfigError, match="fewer engines than the learner has processes"):
        addresses("auto", ["node:80"], str(tmp_path / "token"), Learners(whole=(0, 2)))
    assert [one.name for one in addresses("auto", None, None, Learners())] == ["cpu"]


def test_servers_beside_the_learner_are_all_on_its_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    alone = Learners(devices=(0,))
    assert [one.name for one in addresses("auto", None, None, alone)] == ["cuda:1"]
    assert [one.name for one in addresses([0, 0], None, None, alone)] == ["cuda:0", "cuda:0"]
    for devices, learners in (([0, 1], alone), ([0, 0], Learners(devices=(0, 1), local=(0, 2), whole=(0, 2)))):
        with pytest.raises(ConfigError, match="Some servers would share a GPU"):
            addresses(devices, None, None, learners)
    with pytest.raises(ConfigError, match="NCCL takes one process of each GPU"):
        RemoteVLLMEngine(devices=[0, 0], transfer="nccl").validate(SamplerSpec(learners=alone))


def test_a_server_sees_its_gpu_by_the_name_that_this_process_was_given(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    engine = RemoteVLLMEngine()
    engine.spec = SamplerSpec(learners=Learners(devices=(0,)))
    (address,) = addresses("auto", None, None, engine.spec.learners)
    for here, seen in ((None, "1,0"), ("2,3", "3,2"), ("GPU-a,GPU-b", "GPU-b,GPU-a")):
        if here is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", here)
        assert engine._seen(address) == {"CUDA_VISIBLE_DEVICES": seen}
    # of several learners each opens its servers its own GPU's memory
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    engine.spec = SamplerSpec(learners=Learners(devices=(0, 1), local=(1, 2), whole=(1, 2)))
    assert engine._seen(Address("cuda:3")) == {"CUDA_VISIBLE_DEVICES": "3,1"}


def test_a_burst_of_requests_waits_until_the_socket_takes_them(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "CONNECT", 5.0)
    made = Server(Address("cpu"), 5.0)
    made._folder = tmp_path
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(str(tmp_path / server.SOCKET))
        held.listen(0)
        taking = threading.Timer(0.3, lambda: [held.accept()[0].close() for _ in range(6)])
        taking.start()
        with ThreadPoolExecutor(6) as pool:
            ended = [pool.submit(made._ask, "GET", "/health", None, 5.0) for _ in range(6)]
        taking.join()
    assert not any(isinstance(one.exception(), BlockingIOError) for one in ended)


@pytest.fixture
def answering(monkeypatch):
    """`answering(answer)` returns an engine of two servers that give that answer to everything."""
    monkeypatch.setattr(Server, "watched", lambda self, kind: nullcontext())

    def made(answer):
        monkeypatch.setattr(Server, "post", lambda self, path, body: answer)
        engine = RemoteVLLMEngine(hosts=["here:1"])
        engine.servers = [Server(Address(name, KEY), silence=5) for name in ("http://one:1", "http://two:1")]
        return engine

    return made


@pytest.mark.parametrize(("files", "at_once"), [(client.OTHERS + 7, 3), (64, 1), (-1, client.AT_ONCE)])
def test_no_more_requests_are_under_way_than_files_may_be_open(files, at_once, answering, monkeypatch):
    sizes, answered = [], {}

    def pool(size, name):
        sizes.append(size)
        return ThreadPoolExecutor(min(size, 4), name)

    monkeypatch.setattr(client, "ThreadPoolExecutor", pool)
    monkeypatch.setattr(client.resource, "getrlimit", lambda limit: (files, files))
    asked = [[requests.Asked(key, [1], group=key) for key in range(40)]]
    answering({"prompt_logprobs": [None]})._draw("score", lambda more: asked.pop() if asked else None, answered.update)
    assert len(answered) == 40
    assert sizes == [at_once] * 2


NOTHING = {"token_ids": [], "logprobs": {"content": []}, "finish_reason": "length"}
FEWER = {"token_ids": [7, 8], "logprobs": {"content": [{"logprob": -1.0}]}, "finish_reason": "length"}
GIVEN_UP = {"token_ids": [7], "logprobs": {"content": [{"logprob": -1.0}]}, "finish_reason": "abort"}


@pytest.mark.parametrize(
    "answer", [{}, *({"choices": [one]} for one in (NOTHING, FEWER, GIVEN_UP)), {"prompt_logprobs": []}]
)
def test_an_answer_without_what_was_asked_for_is_a_death(answer, answering):
    asked = [[requests.Asked(0, [1, 2], None if "prompt_logprobs" in answer else SamplingParams())]]
    with pytest.raises(EngineDiedError, match="one:1 is gone: its answer lacks what was asked for"):
        answering(answer)._draw("draw", lambda more: asked.pop() if asked else None, {}.update)


def test_a_server_that_did_not_start_says_what_its_engine_said(tmp_path):
    cause = "ValueError: Free memory on device cuda:0 (55.85/139.8 GiB) on startup is less than desired."
    engine = f"(EngineCore pid=7) ERROR 11-27 [core.py:9] {cause}\n" * 2
    frames = "  a frame\n" * 60
    (tmp_path / "log").write_text(f"{engine}{frames}RuntimeError: Engine core initialization failed.\n")
    dead = SimpleNamespace(
        _process=SimpleNamespace(wait=lambda seconds: 1), _folder=tmp_path, address=Address("cuda:1")
    )
    said = Server._ended(dead, "it did not come up")
    assert "ended with status 1: it did not come up" in said
    assert said.endswith(f"({cause} | RuntimeError: Engine core initialization failed.)")
    (tmp_path / "log").write_text("ImportError: of a module that is not needed\n" + "a quiet line\n" * 5000)
    assert Server._ended(dead, "Connection refused").endswith("Connection refused")


@pytest.fixture
def served(monkeypatch):
    """An engine over processes that speak as vLLM's server does, and what they are asked: paths, newest last."""
    monkeypatch.setattr(server, "command", lambda: [sys.executable, served_stand_in.__file__])
    monkeypatch.setenv("STAND_IN_VERSIONS", json.dumps(versions()))
    monkeypatch.setattr(server, "BEAT", 0.1)
    network, asked, made = tiny_network(), [], []
    ask = Server._ask

    def noting(one, method, path, body, timeout):
        asked.append(body["method"] if path == "/collective_rpc" else path)
        for strike in [strike for what, strike in struck if what == path]:
            struck.clear()
            strike(one)
        return ask(one, method, path, body, timeout)

    struck = []
    monkeypatch.setattr(Server, "_ask", noting)

    def engine(silence=1.0):
        made.append(RemoteVLLMEngine(devices=["cpu", "cpu"], silence=silence, dtype="fp32"))
        monkeypatch.setattr(VLLM, "validate", lambda self, spec: None)
        spec = SamplerSpec(sampling=SamplingParams(max_tokens=5), prompt_limit=16)
        made[-1].setup(spec, SimpleNamespace(network=network))
        return made[-1]

    stream = [("a", torch.zeros(3)), ("b", torch.ones(2))]

    def publish(one, version):
        return one.load_weights(iter(stream), None, version)

    yield SimpleNamespace(engine=engine, asked=asked, struck=struck, publish=publish)
    for one in made:
        one.close()
        assert one._folder is None


@pytest.mark.vllm
@pytest.mark.parametrize("what", ["/inference/v1/generate", "/update_weights", "the first /update_weights"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_death_is_named_in_time_and_the_next_server_draws_the_same(served, what, how):
    engine, asked = served.engine(), [[5, 6], [7, 8, 9], [10]]
    first = what.startswith("the first")
    if not first:
        served.publish(engine, 0)
        expected = engine.generate(asked, 2, seed=5)
    served.struck.append((what.rpartition(" ")[2], lambda one: os.killpg(one._process.pid, how)))
    begun = time.monotonic()
    with pytest.raises(EngineDiedError, match="status -9" if how == signal.SIGKILL else "is given up: no answer"):
        served.publish(engine, 1) if "update" in what else engine.generate(asked, 2, seed=5)
    assert time.monotonic() - begun < 10
    with pytest.raises(RuntimeError, match="no complete weights"):
        engine.generate(asked, 2, seed=5)
    engine.discard()
    engine.setup(engine.spec, engine.policy)
    assert served.publish(engine, 1).version == 1
    drawn = engine.generate(asked, 2, seed=5)
    assert [one.token_ids for one in drawn] == [one.token_ids for one in (drawn if first else expected)]


@pytest.mark.vllm
def test_turns_are_drawn_by_servers_and_a_death_ends_the_dialogue(served):
    engine = served.engine()
    served.publish(engine, 0)

    def talked():
        with Conversations(
            Echo(), [{"says": ["", ""]}] * 4, [[5], [6, 7], [8], [9]], lambda said: [7], str, 5, seed=3
        ) as talks:
            engine.converse(talks)
        return [one.token_ids for one in talks.completions()]

    expected = talked()
    assert [len(one) for one in expected] == [5] * 4
    served.struck.append(("/inference/v1/generate", lambda one: os.killpg(one._process.pid, signal.SIGKILL)))
    with pytest.raises(EngineDiedError, match="status -9"):
        talked()
    engine.discard()
    engine.setup(engine.spec, engine.policy)
    served.publish(engine, 1)
    assert talked() == expected


@pytest.mark.vllm
def test_a_publish_that_its_sender_breaks_off_is_given_up_and_the_next_is_whole(served):
    engine = served.engine()

    def broken():
        yield "a", torch.zeros(3)
        raise ValueError("not finite")

    with pytest.raises(ValueError, match="not finite"):
        engine.load_weights(broken(), None, 0)
    assert served.asked[-1] == "abandon_update"
    assert all(one.ready for one in engine.servers)
    with pytest.raises(RuntimeError, match="no complete weights"):
        engine.generate([[5]], 1, seed=0)
    served.publish(engine, 1)
    assert len(engine.generate([[5]], 1, seed=0)) == 1


@pytest.mark.vllm
def test_pages_with_nan_do_not_outlive_the_weights_that_made_them(served):
    engine, cleared = served.engine(), []
    for prompt in (12, 13, 12):
        served.publish(engine, len(cleared))
        engine.generate([[prompt]], 1, seed=0)
        cleared.append(served.asked.count("clear_kv_cache"))
    assert cleared == [0, 0, 2]  # one for each server


@pytest.mark.vllm
def test_the_first_of_a_kind_may_take_longer_than_a_server_may_be_silent(served):
    engine = served.engine()
    served.publish(engine, 0)
    assert len(engine.generate([[14]], 1, seed=0)) == 1
    engine.generate([[5], [6, 7]], 1, seed=0)
    with pytest.raises(EngineDiedError, match=r"no answer to /collective_rpc for 1 s"):
        engine.generate([[14]], 1, seed=0)


@pytest.mark.vllm
def test_servers_share_no_port_and_nothing_that_an_engine_of_this_process_left(served, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_DIST_IDENT", "this process")
    one, other = served.engine().servers
    said = [Path(f"/proc/{each._process.pid}/environ").read_bytes().decode().split("\0") for each in (one, other)]
    for words in said:
        assert "VLLM_ENABLE_V1_MULTIPROCESSING=1" in words
        assert not [word for word in words if word.startswith("VLLM_DIST_IDENT")]
    places = [each._folder for each in (one, other)]
    assert [place.stat().st_mode & 0o777 for place in places] == [0o700] * 2
    assert places[0] != places[1]
    keys = [next(word for word in words if word.startswith(guard.KEY)) for words in said]
    assert keys[0] != keys[1]


def test_weights_in_flight_need_a_server_that_says_which_drew_which_token():
    engine = RemoteVLLMEngine(devices=["cpu"])
    engine._says_versions = False
    with pytest.raises(ConfigError, match=r"does not know or say which weights drew which token.*vLLM 0\.32 or later"):
        engine.validate(SamplerSpec(in_flight="keep"))
