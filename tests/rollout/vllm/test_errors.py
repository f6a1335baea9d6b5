import time

import pytest
import torch

from lit_qrl.errors import ConfigError, MemoryShortageError, within_memory
from lit_qrl.receipts.ledger import Fault, PublishError, RefusedError
from lit_qrl.rollout.engine import EngineDiedError
from lit_qrl.rollout.vllm.errors import LONGEST, blamed, deadly
from lit_qrl.rollout.vllm.watchdog import Watchdog
from tests.vllm_engines import build_engine, checkpoint, publish, tiny_network

SENT = [("a.weight", torch.ones(2)), ("b.weight", torch.zeros(2))]


def loaded(error=None, tensors=SENT, watchdog=None):
    """Take a whole stream as an engine does, then raise."""
    with blamed(iter(tensors), 3, watchdog or Watchdog(60)) as stream:
        taken = list(stream)
        if error is not None:
            raise error
    return taken


def test_a_stream_passes_unchanged():
    assert loaded() == SENT


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no parameter 'x'"),
        KeyError("x.weight"),
        AssertionError("(2,) != (3,)"),
        RuntimeError("start (0) + length (512) exceeds dimension size (256)"),
    ],
)
def test_what_the_loader_refuses_is_a_refused_publish(error):
    with pytest.raises(
        RefusedError, match=rf"^vLLM's own loader raised {type(error).__name__}: .*another version"
    ) as caught:
        loaded(error)
    assert (caught.value.version, caught.value.__cause__) == (3, error)


def test_a_long_list_of_parameters_is_cut_and_an_empty_message_is_none():
    with pytest.raises(RefusedError) as caught:
        loaded(ValueError("names:\n" + "weight\n" * 500))
    assert len(str(caught.value)) < LONGEST + 200
    assert "\n" not in str(caught.value)
    with pytest.raises(RefusedError, match=r"raised AssertionError\. It knows"):
        loaded(AssertionError())


@pytest.mark.parametrize("error", [RuntimeError("illegal access"), MemoryError("too much"), NotImplementedError("no")])
def test_a_crash_is_the_engine_s_death(error):
    with pytest.raises(EngineDiedError, match=f"failed while loading: {type(error).__name__}: {error}"):
        loaded(error)


@pytest.mark.parametrize(
    "error", [PublishError([Fault("stale", "x")], 1), ConfigError("A key is wrong."), TypeError("bug")]
)
def test_what_is_said_already_and_what_is_a_bug_stay(error):
    with pytest.raises(type(error)) as caught:
        loaded(error)
    assert caught.value is error


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), ValueError("a callback's own"), ConfigError("NaN")])
def test_what_fails_in_the_stream_is_the_sender_s(error):
    def stream():
        yield SENT[0]
        raise error

    with pytest.raises(type(error)) as caught:
        loaded(tensors=stream())
    assert caught.value is error


def test_a_publish_that_hangs_is_a_death_and_every_tensor_has_its_own_time():
    def stream():
        for item in SENT:
            watchdog._begun -= 40  # as if the tensor before had taken so long
            yield item

    watchdog = Watchdog(60, what="the publish of one tensor")
    with blamed(stream(), 3, watchdog) as sent:
        list(sent)

    def hanging():
        yield SENT[0]
        time.sleep(60)

    with pytest.raises(EngineDiedError, match=r"hangs: the publish of one tensor took longer than 0\.2 s"):
        loaded(tensors=hanging(), watchdog=Watchdog(0.2, what="the publish of one tensor"))


def test_a_sleep_or_a_wake_that_fails_or_hangs_is_a_death():
    with pytest.raises(EngineDiedError, match=r"vLLM did not wake: RuntimeError: CUDA Error: out of memory\. Lower it"):
        with deadly("did not wake", Watchdog(60), "Lower it"):
            raise RuntimeError("CUDA Error: out of memory")
    with pytest.raises(EngineDiedError, match=r"vLLM did not sleep: TimeoutError: the sleep took longer than 0\.2 s"):
        with deadly("did not sleep", Watchdog(0.2, what="the sleep")):
            time.sleep(60)
    with pytest.raises(MemoryShortageError, match=r"while it slept: 2\.00 GiB were asked for\. Lower it"):
        with deadly("did not sleep", Watchdog(60)), within_memory("it slept", "Lower it."):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.vllm
def test_a_start_that_hangs_is_a_death(monkeypatch):
    import vllm

    engine = build_engine(tiny_network(), None, start_timeout=0.2)
    monkeypatch.setattr(vllm, "LLM", lambda **arguments: time.sleep(60))
    with pytest.raises(EngineDiedError, match=r"did not start: TimeoutError: the start took longer than 0\.2 s"):
        engine.load_weights(iter(SENT), None, 0)


@pytest.mark.vllm
def test_a_name_that_vllm_does_not_know_is_refused_and_the_next_publish_arrives():
    network = tiny_network()
    engine = build_engine(network, None)
    assert publish(network, engine, None, 0)[0] == []
    engine.live.routes, engine.live.learns_routes = None, False
    wrong = [("model.layers.0.mlp.side_proj.weight", torch.ones(2, 2)), *checkpoint(network, engine, None)]
    with pytest.raises(RefusedError, match=r"vLLM's own loader raised ValueError: .*side_proj"):
        engine.load_weights(iter(wrong), None, 1)
    with pytest.raises(RuntimeError, match="no complete weights"):
        engine.score([[1, 2, 3]])
    assert publish(network, engine, None, 2)[0] == []
    engine.close()
