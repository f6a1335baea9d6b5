from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig

from lit_qrl.errors import ConfigError
from lit_qrl.policy import CausalPolicy
from lit_qrl.precision import NVFP4LoRA, QATAligned
from lit_qrl.precision.source import WeightSource, unchanged
from lit_qrl.publish.delivery import AdapterBeside
from lit_qrl.publish.spec import published_apart
from lit_qrl.receipts.ledger import PublishReport
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.engine import RolloutEngine
from lit_qrl.rollout.vllm.client import RemoteVLLMEngine
from lit_qrl.rollout.vllm.engine import VLLMEngine
from tests.tiny_run import model_folder

LORA = LoraConfig(r=8, target_modules=["q_proj"])


def apart(lora="auto", config=LORA, engine=None, plugin=None, aligned=False, unaligned=False):
    return published_apart(lora, config, engine or TransformersEngine(), plugin, aligned, unaligned)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, False),  # a plain base is merged
        ({"config": None}, False),
        ({"lora": "adapter"}, True),
        ({"lora": "merged"}, False),
        ({"plugin": QATAligned("fp8_row"), "aligned": True}, False),
        ({"plugin": NVFP4LoRA(), "aligned": True}, True),  # a packed base goes out once
        ({"plugin": NVFP4LoRA(), "aligned": False}, False),  # an evaluation in another format
        ({"lora": "merged", "plugin": NVFP4LoRA(), "aligned": True, "unaligned": True}, False),
        ({"lora": "adapter", "engine": VLLMEngine()}, True),  # which says itself how much room it has
    ],
)
def test_where_the_adapter_goes(options, expected):
    assert apart(**options) is expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": "merged", "plugin": NVFP4LoRA(), "aligned": True}, r"rounded once more.*lora: adapter.*unaligned"),
        ({"lora": "adapter", "config": None}, r"no adapter to publish.*model\.policy\.lora"),
        (
            {"lora": "adapter", "config": LoraConfig(r=8, use_dora=True, target_modules=["q_proj"])},
            r"use_dora cannot be published apart",
        ),
        ({"plugin": NVFP4LoRA(share_weights=True), "aligned": False}, r"share_weights needs the plugin's own base"),
        ({"plugin": NVFP4LoRA(share_weights=True), "aligned": True}, r"no weights that a learner could share"),
        (
            {"engine": RemoteVLLMEngine(), "plugin": NVFP4LoRA(share_weights=True), "aligned": True},
            r"RemoteVLLMEngine keeps no weights that a learner could share.*share_weights to false",
        ),
    ],
)
def test_what_cannot_go_out_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        apart(**options)


def test_an_engine_that_takes_no_adapters_is_named():
    class Merged(RolloutEngine):
        setup = generate = load_weights = None

    with pytest.raises(ConfigError, match=r"Merged cannot load adapters.*merged"):
        apart("adapter", engine=Merged())
    assert apart("merged", engine=Merged()) is False
    assert apart("auto", engine=SimpleNamespace()) is False  # never asked


class Told:
    """A delivery that says what it was told to send."""

    def __init__(self):
        self.story, self.engine = [], SimpleNamespace(plain_dtype=torch.bfloat16)

    def weights(self, stream, format, shapes, version):
        names = [name for name, _ in stream]
        self.story.append("base")
        return PublishReport(version=version, seconds=0.0, bytes=100, layers=dict.fromkeys(names, "nvfp4"))

    def part(self, kind, stream, version):
        tensors = dict(stream)
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
        self.story.append(kind if kind == "adapter" else (kind, sorted(tensors)))
        return PublishReport(version=version, seconds=0.0, bytes=1, layers=dict.fromkeys(tensors, "bf16"))


def test_the_base_goes_out_once_and_again_when_it_changed_or_was_forgotten(tmp_path):
    policy = CausalPolicy(model_folder(tmp_path), lora=LoraConfig(r=4, target_modules=["q_proj"]))
    policy.configure()
    delivery = Told()
    beside = AdapterBeside(WeightSource(policy, None), delivery)
    norm = "model.layers.0.input_layernorm.weight"

    def noisy(name, tensor):
        return tensor + 1 if name == norm else tensor

    report = beside.publish(noisy, 0)
    assert report.bytes == 102
    assert (report.layers[norm], report.layers["model.embed_tokens.weight"]) == ("nvfp4", "nvfp4")
    assert report.layers["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"] == "bf16"
    assert beside.publish(unchanged, 1).bytes == 2
    assert beside.publish(unchanged, 2).bytes == 1
    beside.forget()
    beside.publish(unchanged, 3)
    with torch.no_grad():
        policy.network.get_parameter(norm).mul_(1.5)
    beside.publish(unchanged, 4)
    first = ["base", ("norms", [norm]), "adapter"]
    assert delivery.story == [*first, ("norms", [norm]), "adapter", "adapter", *["base", "adapter"] * 2]
