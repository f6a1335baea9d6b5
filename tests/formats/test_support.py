"""FP8 on GPUs that lack it: one sentence from everything that would multiply in it, refused or told once."""

from types import SimpleNamespace

import pytest
import torch

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.formats import support
from lit_qrl.formats.kernels import gemm
from lit_qrl.precision.qat import QATAligned
from lit_qrl.precision.unified_fp8 import UnifiedFP8
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.engine import SamplerSpec
from lit_qrl.rollout.vllm import checks as vllm_checks
from tests.networks import build_network

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
FP8 = ("fp8_tensor", "fp8_row", "fp8_block")
NONE_HERE = "{} multiplies in {}, for which there is no FP8 GEMM on this GPU."


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that CUDA devices have that capability."""

    def pretend(capability, cuda="13.0"):
        monkeypatch.setattr(gemm, "capability", lambda index: capability)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    support._warn.cache_clear()
    yield pretend
    support._warn.cache_clear()


def told(caplog):
    return [message for message in caplog.messages if "It is emulated: the same numbers" in message]


def on(device, network):
    """What Lightning gives `convert_module`: a module whose Trainer will put it on that device."""
    network._trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=device), datamodule=None)
    return network


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6)])
@pytest.mark.parametrize("name", FP8)
def test_below_8_9_all_say_the_same(capability, name, gpu, caplog):
    gpu(capability)
    here = "{}.{}".format(*capability)
    for user, call, remedy in (
        ("QATAligned", lambda: QATAligned(name).convert_module(on(CUDA, build_network())), "backend: emulate"),
        ("VLLMEngine", lambda: vllm_checks.check_format(formats.get(name)), "use TransformersEngine, which emulates"),
    ):
        with pytest.raises(ConfigError) as refused:
            call()
        assert refused.value.what == NONE_HERE.format(user, name)
        assert refused.value.expected == "compute capability 8.9 or newer"
        assert refused.value.given == f"A GPU ({here})"
        assert remedy in refused.value.remedy
    support.tell_emulated("TransformersEngine", formats.get(name), CUDA)
    (message,) = told(caplog)
    assert message.startswith(NONE_HERE.format("TransformersEngine", name))
    assert f"Given: A GPU ({here}" in message


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("name", FP8)
def test_from_8_9_on_nothing_is_refused(capability, name, gpu):
    gpu(capability)
    support.require_fp8("Anybody", formats.get(name), CUDA, "")
    vllm_checks.check_format(formats.get(name))


@pytest.mark.parametrize("name", ["bf16", "int8_channel", "int4_group", "nvfp4"])
def test_other_formats_and_other_devices_are_not_asked(name, gpu, caplog):
    gpu((7, 0))
    for format, device in ((formats.get(name), CUDA), (formats.get("fp8_row"), CPU), (None, CUDA)):
        support.require_fp8("Anybody", format, device, "")
        support.tell_emulated("Anybody", format, device)
    assert not told(caplog)


@pytest.mark.parametrize(
    ("capability", "cuda", "name", "needed"),
    [
        ((8, 0), "13.0", "fp8_row", "compute capability 8.9 or newer"),
        ((8, 0), "13.0", "fp8_block", "compute capability 9.0 and CUDA 12.9 or newer"),
        ((8, 9), "13.0", "fp8_row", None),
        ((8, 9), "13.0", "fp8_block", "compute capability 9.0 and CUDA 12.9 or newer"),
        ((9, 0), "12.8", "fp8_block", "compute capability 9.0 and CUDA 12.9 or newer"),
        ((9, 0), "12.9", "fp8_block", None),
        ((10, 0), "13.0", "fp8_block", "compute capability 9.0 and CUDA 12.9 or newer"),
    ],
)
def test_emulation_is_told_where_our_own_gemm_has_nothing_else(capability, cuda, name, needed, gpu, caplog):
    gpu(capability, cuda)
    for _ in range(3):
        support.tell_emulated("TransformersEngine", formats.get(name), CUDA)
    messages = told(caplog)
    assert len(messages) == (0 if needed is None else 1)
    assert all(f"Expected: {needed}." in message for message in messages)


@pytest.mark.parametrize(("backend", "device", "messages"), [("auto", CUDA, 1), ("auto", CPU, 0), ("emulate", CUDA, 0)])
def test_a_unified_learner_that_chose_to_emulate_says_so(backend, device, messages, gpu, caplog):
    gpu((8, 0))
    plugin = UnifiedFP8(backend)
    for _ in range(2):
        plugin.convert_module(on(device, build_network()))
    assert plugin.backend.name == "emulate"
    assert len(told(caplog)) == messages
    assert all(message.startswith(NONE_HERE.format("UnifiedFP8", "fp8_block")) for message in told(caplog))


def test_the_embedded_engine_tells_at_its_first_publish(gpu, caplog, monkeypatch):
    gpu((8, 0))
    network = build_network()
    engine = TransformersEngine()
    engine.setup(SamplerSpec(), SimpleNamespace(network=network))
    monkeypatch.setattr(engine._modules, "device", CUDA)  # asked before anything is put there
    for version in range(2):
        with pytest.raises(ValueError, match="incomplete"):
            engine.load_weights(iter([]), formats.get("fp8_row"), version)
    (message,) = told(caplog)
    assert message.startswith(NONE_HERE.format("TransformersEngine", "fp8_row"))


def test_every_format_has_a_row_and_every_row_a_format():
    assert list(support.TABLE) == formats.names()


def test_a_row_is_that_of_the_options():
    plain, fp8, int8 = (formats.get("int4_group", activations=kind) for kind in (None, "fp8", "int8"))
    assert [support.row_of(format).vllm for format in (plain, fp8, int8)] == [("cpu", "cuda"), ("cuda",), ("cuda",)]
    # activations that change nothing have no row of their own
    token = formats.get("fp8_tensor", activations="token")
    assert support.row_of(token) is support.TABLE["fp8_tensor"]


def test_a_format_without_a_row_is_known_to_nobody_else(format_rows):
    del support.TABLE["nvfp4"]
    assert support.row_of(formats.get("nvfp4")) == formats.FormatSupport()
    assert support.names_where(lambda row: "cuda" in row.vllm_lends) == []


@pytest.mark.parametrize("name", support.TABLE)
def test_rows_do_not_contradict_themselves(name):
    row = support.TABLE[name]
    for one in (row, *row.under.values()):
        assert set(one.vllm) | set(one.vllm_lends) | set(one.vllm_copied_on) <= {"cpu", "cuda"}
        assert set(one.vllm_lends) <= set(one.vllm)
        assert not one.vllm_cpu_operators or "cpu" in one.vllm
        assert not one.own_gemm or one.fp8
    assert all(any(method.startswith(kind) for method in row.vllm_methods) for kind in row.vllm_copied) or name in (
        *("bf16", "fp16", "fp32"),
    )
    spelled = [method for other in support.TABLE.values() for method in other.vllm_methods]
    assert len(spelled) == len(set(spelled)), "a method computes in one format"
