"""From arguments to the engine's spec; whole runs that are refused are in test_publisher.py."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from peft import LoraConfig, get_peft_model

from lit_qrl import formats
from lit_qrl.callbacks import AIS, WeightPublisher
from lit_qrl.errors import ConfigError
from lit_qrl.formats import MultipliedOut
from lit_qrl.loop.contracts import Schedule
from lit_qrl.objective import GRPO
from lit_qrl.precision import NVFP4LoRA, QATAligned
from lit_qrl.publish.spec import compute_dtype, make_room, sampler_spec, source_of
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.engine import RolloutEngine, SamplerSpec
from lit_qrl.rollout.vllm import VLLMEngine
from lit_qrl.strategies import ShardedStrategy
from lit_qrl.types import SamplingParams
from tests.networks import build_network

LORA, SAMPLING = LoraConfig(r=8, target_modules=["q_proj"]), SamplingParams(max_tokens=7)
NETWORK = build_network()


def spec(plugin=None, adapter=None, tied=False, engine=None, callbacks=(), sampling=SAMPLING, dtype="auto", **settings):
    config = SimpleNamespace(model_type="toy", tie_word_embeddings=tied)
    config.get_text_config = lambda: config
    learner = SimpleNamespace(
        trainer=SimpleNamespace(
            precision_plugin=plugin or Precision(),
            strategy=SingleDeviceStrategy(),
            callbacks=callbacks,
            accelerator=CPUAccelerator(),
            max_epochs=3,
            world_size=1,
            num_nodes=1,
            local_rank=0,
            global_rank=0,
        ),
        policy=SimpleNamespace(
            config=config,
            lora=adapter,
            head_dtype=torch.float32,
            model=NETWORK,
            network=NETWORK,
            denoises=False,
            dtype=dtype,
        ),
        data=SimpleNamespace(
            engine=engine or TransformersEngine(),
            schedule=Schedule(),
            in_flight_updates="none",
            sampling=sampling,
            max_prompt_tokens=11,
            longest_evaluation=30,
            evaluation_limits=(19,),
        ),
        objective=GRPO(),
    )
    return sampler_spec(WeightPublisher(**settings), learner, print)


def test_what_was_kept_is_asked_for_where_a_correction_compares_truncated_samples():
    truncated = SamplingParams(max_tokens=7, top_p=0.9)
    assert spec(callbacks=[AIS()], sampling=truncated).kept
    assert not spec(callbacks=[AIS()]).kept
    assert not spec(sampling=truncated).kept
    assert not spec(callbacks=[AIS()], sampling=SamplingParams(max_tokens=7, top_k=4, temperature=0)).kept


def test_what_the_engine_is_told():
    fp8 = formats.get("fp8_row")
    expected = SamplerSpec(
        decode_steps=3 * 7,
        sampling=SAMPLING,
        head_dtype=torch.float32,
        prompt_limit=11,
        sequence_limit=30,
        evaluation_limits=(19,),
        on_hang=print,
    )
    assert spec() == expected
    told = spec(format=fp8, exclude=("*.o_proj",), every_n_iterations=2, quantize_head=True)
    assert (told.format, told.exclude, told.outlives_update, told.quantize_head) == (fp8, ("*.o_proj",), True, True)
    aligned = spec(QATAligned("fp8_row", exclude=["*.down_proj"]))
    assert (aligned.format, aligned.exclude) == (fp8, ("*.down_proj",))
    other = spec(QATAligned("fp8_row", exclude=["*.down_proj"]), format=formats.get("nvfp4"), unaligned=True)
    assert (other.format.name, other.exclude) == ("nvfp4", ())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"plugin": QATAligned("fp8_row")}, "computes the head in full precision.*QATAligned"),
        ({"format": formats.get("bf16")}, "no format of its own to quantize to.*bf16"),
        ({}, "no format of its own to quantize to.*auto"),
        ({"format": formats.get("fp8_row"), "tied": True}, "would quantize the input embedding"),
    ],
)
def test_a_head_that_cannot_be_quantized_is_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        spec(quantize_head=True, **options)


def test_a_learner_that_computes_in_another_dtype_than_its_weights_says_so():
    assert spec().compute_dtype is None
    assert spec(MixedPrecision("bf16-mixed", "cpu")).compute_dtype == torch.bfloat16
    assert spec(MixedPrecision("16-mixed", "cuda", scaler=torch.amp.GradScaler("cpu"))).compute_dtype == torch.float16
    assert spec(QATAligned("fp8_row", autocast="bf16")).compute_dtype == torch.bfloat16
    assert spec(QATAligned("fp8_row")).compute_dtype is None
    strategy = ShardedStrategy()
    assert compute_dtype(SimpleNamespace(precision_plugin=Precision(), strategy=strategy)) == torch.bfloat16
    strategy = ShardedStrategy(compute_dtype="fp32")
    assert compute_dtype(SimpleNamespace(precision_plugin=Precision(), strategy=strategy)) is None


def test_an_adapter_is_told_only_where_it_stands_beside_its_base():
    assert spec(NVFP4LoRA(), LORA).adapter is LORA
    assert spec(adapter=LORA, lora="adapter").adapter is LORA
    assert spec(adapter=LORA).adapter is None


def test_the_engine_checks_the_spec_last_and_is_told_where_it_is_not_probed(caplog):
    class Refuses(RolloutEngine):
        setup = generate = load_weights = None

        def validate(self, spec):
            raise ConfigError(f"not {spec.prompt_limit}")

    for options, said in (({"probe_every": 0}, False), ({}, True)):
        with caplog.at_level("INFO", logger="lit_qrl"), pytest.raises(ConfigError, match="not 11"):
            spec(engine=Refuses(), **options)
        assert ("Refuses cannot score given tokens" in caplog.text) == bool(caplog.text) == said


def test_master_weights_are_not_promised_of_an_engine_that_holds_one_format(caplog):
    class OneFormat(TransformersEngine):
        single_format = True

    for engine, choice, told in (
        (OneFormat(), "learner", True),
        (OneFormat(), "auto", False),
        (TransformersEngine(), "learner", False),
    ):
        caplog.clear()
        spec(QATAligned("fp8_row"), engine=engine, evaluation_format=choice)
        assert ("OneFormat holds fp8_row alone, so evaluations are in it." in caplog.text) == told


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"format": formats.get("fp8_row")}, "publisher.format: fp8_row"),
        ({"format": formats.get("bf16")}, "publisher.format: bf16"),
        ({"adapter": LORA}, "model.policy.lora"),
        ({"plugin": MixedPrecision("bf16-mixed", "cpu")}, "trainer.precision: bf16-mixed"),
        ({"plugin": QATAligned("fp8_row", autocast="bf16")}, "autocast"),
        ({"plugin": QATAligned("fp8_row"), "format": formats.get("nvfp4"), "unaligned": True}, "nvfp4"),
        ({"plugin": QATAligned("fp8_row"), "unaligned": True}, "publisher.unaligned: true"),
    ],
)
def test_a_batch_invariant_engine_wants_one_arithmetic_for_learner_and_sampler(options, given):
    engine = TransformersEngine(batch_invariant=True)
    with pytest.raises(ConfigError, match="compute differently") as error:
        spec(engine=engine, **options)
    assert given in str(error.value)
    assert spec(engine=engine).format is None
    assert spec(engine=engine, format=formats.get("bf16"), dtype="bf16").format == formats.get("bf16")
    assert spec(QATAligned("fp8_row"), engine=engine).format == formats.get("fp8_row")
    assert spec(QATAligned("int4_group", kernel="dequantize"), engine=engine).format == formats.get("int4_group")


@pytest.mark.parametrize(
    ("plugin", "given"),
    [
        (QATAligned("int4_group", kernel="dequantize"), "kernel: dequantize"),
        (NVFP4LoRA(share_weights=True), "share_weights of the precision plugin"),
        (None, "model.policy.head_dtype: fp32"),
    ],
)
def test_where_vllm_is_the_batch_invariant_engine_its_own_kernels_and_head_are_wanted(plugin, given, monkeypatch):
    engine = TransformersEngine(batch_invariant=True)
    monkeypatch.setattr(engine, "kernels", "vllm", raising=False)
    with pytest.raises(ConfigError, match=f"compute differently.*Given: {given}"):
        spec(plugin, engine=engine)


class Exact(TransformersEngine):
    """An engine that multiplies as `VLLMEngine` does with `batch_invariant`, and loads anything."""

    kernels = "vllm"

    def validate(self, spec):
        self.spec = spec


@pytest.mark.parametrize("name", ["int4_group", "nvfp4", "mxfp4"])
def test_weights_that_vllm_adds_up_in_any_order_go_out_multiplied_out(name, monkeypatch, caplog):
    monkeypatch.setattr("lit_qrl.publish.spec._check_same_arithmetic", lambda *_: None)
    with caplog.at_level("INFO", logger="lit_qrl"):
        told = spec(QATAligned(name), engine=Exact(batch_invariant=True))
    assert f"weights in {name} go to vLLM multiplied out" in caplog.text
    assert told.format == MultipliedOut(formats.get(name))
    assert (told.aligned, told.format.name, told.format.bits_per_weight) == (True, "bf16", 16)
    assert spec(NVFP4LoRA(name), LORA, engine=Exact(batch_invariant=True)).adapter is LORA
    for plugin in (None, QATAligned("fp8_row"), QATAligned("int4_group", activations="fp8")):
        assert not isinstance(spec(plugin, engine=Exact(batch_invariant=True)).format, MultipliedOut)
    assert spec(QATAligned(name)).format == formats.get(name)


@pytest.mark.parametrize("name", ["int4_group", "nvfp4"])
@pytest.mark.parametrize("packed", [False, True])
def test_what_goes_out_multiplied_out_is_what_the_learner_multiplies_by(name, packed):
    torch.manual_seed(0)
    network = build_network(hidden_size=128, intermediate_size=128, head_dim=32).bfloat16()
    format = formats.get(name)
    plugin = NVFP4LoRA(format) if packed else QATAligned(format)
    if packed:
        network = get_peft_model(network, LoraConfig(r=8, target_modules="all-linear")).base_model.model
    policy = SimpleNamespace(network=network, lora=LORA, named_weights=lambda: network.state_dict().items())
    if packed:
        plugin.configure_policy(policy)
    plugin.convert_module(network)
    source = source_of(policy, plugin, MultipliedOut(format))
    assert source.aligned
    sent = dict(source.base(torch.bfloat16) if packed else source.whole(lambda name, tensor: tensor, torch.bfloat16))
    layers = plugin.packed(policy) if packed else plugin.layers(network)
    assert len(layers) == len(source.shapes) == 14
    for layer, held in layers.items():
        weight = held.dequantized(torch.bfloat16) if packed else held.prepared(torch.bfloat16).operand
        assert sent[f"{layer}.weight"].equal(weight)
        assert sent[f"{layer}.weight"].dtype == torch.bfloat16
    assert not [key for key in sent if key.endswith(("_scale", "_packed", "_shape"))]


@pytest.mark.parametrize(("given", "room"), [(0, 32), (8, 8)])
def test_an_engine_without_room_for_an_adapter_gets_that_of_the_policys_rank(given, room):
    engine = VLLMEngine(max_lora_rank=given)
    make_room(engine, LoraConfig(r=20))
    assert engine.max_lora_rank == room
