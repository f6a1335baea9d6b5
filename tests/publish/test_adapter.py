from types import SimpleNamespace

import pytest
from peft import LoraConfig

from lit_qrl.errors import ConfigError
from lit_qrl.precision import NVFP4LoRA, QATAligned
from lit_qrl.publish.spec import published_apart
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.engine import RolloutEngine
from lit_qrl.rollout.vllm.client import RemoteVLLMEngine
from lit_qrl.rollout.vllm.engine import VLLMEngine

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
