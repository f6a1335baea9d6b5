"""An engine behind the server draws what it draws in the learner's process, and every way of dying is outlived."""

import threading
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from lit_qrl.errors import ConfigError
from lit_qrl.publish.delivery import Delivery
from lit_qrl.receipts.ledger import PublishError
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.engine import Converses, EngineDiedError, ReadsBack, SamplerSpec, Scores, Sleeps, TakesAdapter
from lit_qrl.rollout.remote import engine as remote_engine
from lit_qrl.rollout.remote import publishing, replica, transfer
from lit_qrl.rollout.remote.engine import RemoteEngine, RemoteVLLMEngine, spread
from lit_qrl.rollout.remote.replica import Place
from tests.rollout.remote.served import PROMPTS, SAMPLING, Mortal, embedded, publish, remote, server, stream_of
from tests.tiny_run import build, parameters_of

NORM = "model.layers.0.input_layernorm.weight"


def plain(completions):
    return [(one.token_ids, one.logprobs, one.finish_reason, one.version) for one in completions]


def assert_near(got, expected):
    """The same tokens; log-probs but for what other batches round."""
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]
    for one, other in zip(got, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("format", [None, "fp8_row", "int4_group", "nvfp4"])
@pytest.mark.parametrize("transfer", ["memory", "socket", "collective"])
def test_what_is_published_is_verified_and_drawn_with(tmp_path, format, transfer):
    with remote(tmp_path, transfer=transfer) as (engine, network):
        faults, report = publish(engine, network, format)
        assert faults == []
        assert report.version == 0
        near = embedded(network, format)
        assert plain(engine.generate(PROMPTS, 3, 7)) == plain(near.generate(PROMPTS, 3, 7))
        for far, close in zip(engine.score(PROMPTS), near.score(PROMPTS), strict=True):
            assert torch.equal(far, close)


def test_memory_of_a_gpu_is_opened_once_for_all_chunks_of_all_publishes(tmp_path, monkeypatch):
    """Of a GPU that the host plays: what a handle opens is looked up, and counted."""
    lent, opened = {}, []

    def handle(tensor):
        lent[name := str(len(lent)).encode()] = tensor
        return name

    def look_up(name, size):
        opened.append(name)
        return lent[name]

    with remote(tmp_path) as (engine, network):
        monkeypatch.setattr(transfer, "handle", handle)
        monkeypatch.setattr(transfer, "opened", look_up)
        monkeypatch.setattr(publishing, "chunks", partial(publishing.chunks, limit=2000))
        engine.transfer = "ipc"
        engine._sender._memory = [transfer.DeviceMemory(torch.device("cpu")) for _ in range(transfer.SLOTS)]
        for version in range(3):
            with torch.no_grad():
                network.model.norm.weight.add_(1.0)
            assert publish(engine, network, "fp8_row", version)[0] == []
        assert opened == list(lent) == [b"0", b"1"]
        assert plain(engine.generate(PROMPTS, 2, 7)) == [
            (ids, logprobs, reason, 2)
            for ids, logprobs, reason, _ in plain(embedded(network, "fp8_row").generate(PROMPTS, 2, 7))
        ]


def test_a_publish_through_shared_memory_has_no_weight_in_a_message(tmp_path, monkeypatch):
    """What is read again to verify it stays where it is: its receipts come."""
    sizes = []

    def counted(pickler, value):
        if isinstance(value, torch.Tensor):
            sizes.append(value.numel())
        return reduced(pickler, value)

    with remote(tmp_path) as (engine, network):
        reduced = transfer._HostPickler.reducer_override
        monkeypatch.setattr(transfer._HostPickler, "reducer_override", counted)
        delivery = Delivery(engine, lambda phase: nullcontext())
        assert delivery.weights(stream_of(network, None), None, {}, 0).verified_share == 1.0
        assert sizes == []
        assert engine.read_back(NORM).numel() == sizes.pop()  # which would have been seen


def test_a_tensor_that_reads_back_otherwise_is_named_over_the_connection(tmp_path, monkeypatch):
    with remote(tmp_path) as (engine, network):
        delivery = Delivery(engine, lambda phase: nullcontext())
        read = TransformersEngine.read_back
        monkeypatch.setattr(TransformersEngine, "read_back", lambda *args: read(*args) + 1)
        with pytest.raises(PublishError, match=r"read_back: model\.embed_tokens\.weight reads back differently"):
            delivery.weights(stream_of(network, None), None, {}, 0)


def test_a_report_says_where_the_seconds_of_both_sides_went(tmp_path):
    with remote(tmp_path) as (engine, network):
        _, report = publish(engine, network, "fp8_row")
    assert report.parts.keys() == {"send", "await", "engine_wait", "engine_take", "engine_load"}
    assert all(seconds > 0 for seconds in report.parts.values())


def test_one_sending_reaches_all_replicas_also_after_one_was_started_again(tmp_path):
    with remote(tmp_path, servers=2, transfer="collective") as (engine, network):
        assert publish(engine, network)[0] == []
        assert publish(engine, network, version=1)[0] == []
        group = engine._sender._group
        engine.replicas[1].restart()
        engine.setup(SamplerSpec(sampling=SAMPLING), SimpleNamespace(network=network))
        assert publish(engine, network, version=2)[0] == []
        assert engine._sender._group is not group
        assert_near(engine.generate(PROMPTS, 2, 7), embedded(network).generate(PROMPTS, 2, 7))


def test_a_process_that_is_gone_while_all_are_sent_to_is_an_engine_that_died(tmp_path):
    with remote(tmp_path, servers=2, transfer="collective") as (engine, network):
        assert publish(engine, network)[0] == []

        def cut(stream):
            for number, one in enumerate(stream):
                if number == 3:
                    engine.replicas[1].connection.hang_up()
                yield one

        with pytest.raises(EngineDiedError):
            publish(engine, network, version=1, wire=cut)
        engine.discard()
        engine.setup(SamplerSpec(sampling=SAMPLING), SimpleNamespace(network=network))
        assert publish(engine, network, version=2)[0] == []
        assert_near(engine.generate(PROMPTS, 2, 7), embedded(network).generate(PROMPTS, 2, 7))


def test_two_replicas_draw_what_one_draws_and_by_position(tmp_path):
    with remote(tmp_path, servers=2) as (engine, network):
        assert publish(engine, network)[0] == []
        near = embedded(network)
        assert_near(engine.generate(PROMPTS, 2, 7), near.generate(PROMPTS, 2, 7))
        at = [4, 9, 0, 2, 1]
        progress = []
        drawn = engine.generate(PROMPTS, 2, 7, lambda *now: progress.append(now), positions=at)
        assert_near(drawn, near.generate(PROMPTS, 2, 7, positions=at))
        assert progress[-1] == (10, sum(len(one.token_ids) for one in drawn))


def test_completions_of_a_replica_are_handed_out_while_another_draws(tmp_path):
    with remote(tmp_path, servers=2) as (engine, network):
        publish(engine, network)
        assert engine.hands_out
        both_asked, one_is_out, handed = threading.Barrier(2, timeout=60), threading.Event(), []

        def held(draw, wait):
            def drawing(*args, **kwargs):
                both_asked.wait()
                wait()
                return draw(*args, **kwargs)

            return drawing

        def finished(drawn):
            handed.append(drawn)
            one_is_out.set()

        first, second = engine.replicas
        first.draw = held(first.draw, lambda: None)
        second.draw = held(second.draw, lambda: one_is_out.wait(60) or pytest.fail("nothing was handed out"))
        drawn = engine.generate(PROMPTS, 2, 7, finished=finished)
        of_each = {number: one for part in handed for number, one in part.items()}
        assert plain(of_each[i] for i in range(10)) == plain(drawn)


def test_it_can_what_its_engine_can(tmp_path):
    engine = RemoteEngine(TransformersEngine())
    assert isinstance(engine, Scores)
    assert isinstance(engine, ReadsBack)
    assert engine.records_kept
    assert isinstance(engine, TakesAdapter)
    assert not isinstance(engine, Sleeps)
    assert isinstance(engine, Converses)
    other = RemoteVLLMEngine(max_num_seqs=4)
    assert other.single_format
    assert other.kernels == "vllm"
    assert other.overlaps


@pytest.mark.parametrize(
    ("corrupt", "kind"),
    [
        (lambda new: new | {NORM: new[NORM] + 1}, "different"),
        (lambda new: new | {NORM: new[NORM].bfloat16()}, "dtype"),
        (lambda new: new | {NORM: new["model.layers.1.input_layernorm.weight"]}, "swapped"),
    ],
)
def test_what_was_corrupted_on_the_way_is_named(tmp_path, corrupt, kind):
    with remote(tmp_path) as (engine, network):
        with torch.no_grad():
            network.get_parameter("model.layers.1.input_layernorm.weight").mul_(1.5)
        faults, _ = publish(engine, network, wire=lambda stream: iter(corrupt(dict(stream)).items()))
        assert kind in {fault.kind for fault in faults if fault.name == NORM}


def test_a_replica_that_holds_something_else_is_named(tmp_path):
    with remote(tmp_path, servers=2) as (engine, network):
        taken = engine.replicas[1].call

        def other(what, *args, **kwargs):
            return taken(what, *args, **kwargs)

        engine.replicas[1].call = other
        answer = engine.replicas[1].answer

        def corrupted(progress=None):
            report = answer(progress)
            held = report.received.receipts()
            held[NORM] = held["model.norm.weight"]
            return report

        network.get_parameter("model.norm.weight").data.mul_(2)
        engine.replicas[1].answer = corrupted
        faults, _ = publish(engine, network)
        assert [(fault.kind, fault.name) for fault in faults] == [("different", NORM)]
        assert engine.replicas[1].place.name in str(faults[0])


def test_a_publish_that_is_half_sent_is_refused_and_the_next_one_taken(tmp_path):
    with remote(tmp_path) as (engine, network):
        assert publish(engine, network)[0] == []

        def half(stream):
            yield next(stream)
            raise PublishError([], 1)

        with pytest.raises(PublishError):
            publish(engine, network, version=1, wire=half)
        with pytest.raises(RuntimeError, match="no whole set of weights"):
            engine.generate(PROMPTS, 1, 0)
        assert publish(engine, network, version=2)[0] == []
        assert {one.version for one in engine.generate(PROMPTS, 1, 0)} == {2}


def test_a_refusal_of_the_engine_ends_the_stream(tmp_path):
    with remote(tmp_path) as (engine, network):

        def unknown(stream):
            yield "model.nothing.weight", torch.zeros(2)
            yield from stream

        with pytest.raises(PublishError, match=r"no tensor named model\.nothing\.weight"):
            publish(engine, network, wire=unknown)
        assert publish(engine, network)[0] == []


def test_a_run_that_vanishes_in_a_publish_leaves_the_server_ready(tmp_path):
    (tmp_path / "token").write_text("between these two")
    with server() as place:
        for version in range(2):
            engine = RemoteEngine(TransformersEngine(), hosts=[place], token_file=str(tmp_path / "token"))
            network = embedded_network()
            spec = SamplerSpec(sampling=SAMPLING)
            engine.setup(spec, SimpleNamespace(network=network))
            if version == 0:

                def vanish(stream, engine=engine):
                    yield next(stream)
                    engine.replicas[0]._connection.hang_up()
                    yield from stream

                with pytest.raises(EngineDiedError):
                    engine.load_weights(vanish(stream_of(network, None)), None, 0)
            else:
                assert publish(engine, network)[0] == []
            engine.close()


def embedded_network():
    from tests.networks import build_network

    return build_network()


def test_what_the_others_have_drawn_is_kept_when_one_dies(tmp_path, monkeypatch):
    with remote(tmp_path, servers=2, engine=Mortal()) as (engine, network):
        assert publish(engine, network)[0] == []
        whole = engine.generate(PROMPTS, 2, 7)
        monkeypatch.setattr(Mortal, "switch", True)
        with pytest.raises(EngineDiedError, match="as the test wants"):
            engine.generate(PROMPTS, 2, 7)
        kept = set(engine._kept[1])
        assert kept
        assert kept < set(range(len(PROMPTS)))
        engine.discard()
        engine.setup(engine.spec, SimpleNamespace(network=network))
        assert publish(engine, network)[0] == []
        asked = []
        for one in engine.replicas:
            draw = one.draw
            one.draw = lambda *args, draw=draw, **kwargs: asked.extend(args[0]) or draw(*args, **kwargs)
        assert_near(engine.generate(PROMPTS, 2, 7), whole)
        assert sorted(asked) == sorted(PROMPTS[i] for i in range(len(PROMPTS)) if i not in kept)


def test_weights_for_gpus_of_this_host_go_through_memory_of_the_learners_gpu():
    engine = RemoteEngine(TransformersEngine())
    places = [Place("cuda:1"), Place("cpu"), Place("a:1", b"token"), Place("a:1", b"token")]
    seen = [True, True, True, False]
    ways = [engine._way(SimpleNamespace(place=one, sees_memory=s)) for one, s in zip(places, seen, strict=True)]
    assert ways == ["ipc", "memory", "memory", "socket"]
    engine.transfer = "nccl"
    assert engine._way(SimpleNamespace(place=places[0], sees_memory=True)) == "nccl"


def test_prompts_are_spread_by_outstanding_tokens():
    shares = spread([100, 1, 1, 1, 97], 2)
    assert shares == [[0], [1, 2, 3, 4]]
    assert sorted(i for share in spread([5] * 7, 3) for i in share) == list(range(7))


def test_an_engine_that_pickle_does_not_take_is_refused(tmp_path):
    engine = TransformersEngine()
    engine.own = lambda: None
    with pytest.raises(ConfigError, match="cannot be sent to another process"):
        replica._pickled(engine)


def test_handles_of_a_device_are_of_one_host():
    with pytest.raises(ConfigError, match="of one host"):
        RemoteEngine(TransformersEngine(), hosts=["a:1"], token_file="t", transfer="ipc")


def run(folder, engine):
    trainer, module, data = build(
        folder, engine=engine, trainer={"limit_val_batches": 1}, publisher={"max_restarts": 1}
    )
    trainer.fit(module, datamodule=data)
    return parameters_of(module), data


@pytest.mark.slow
def test_a_run_over_processes_of_its_own_is_that_of_the_embedded_engine(tmp_path, monkeypatch):
    expected, _ = run(tmp_path / "near", TransformersEngine())
    engine = RemoteEngine(TransformersEngine(), devices=["cpu", "cpu"])
    killed = []
    generate = RemoteEngine.generate

    def kill_once(self, *args, **kwargs):
        if self.version == 1 and not killed:
            killed.append(self.replicas[1]._process.pid)
            self.replicas[1]._process.kill()
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(remote_engine.RemoteEngine, "generate", kill_once)
    got, _ = run(tmp_path / "far", engine)
    assert killed
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert engine.replicas == []
