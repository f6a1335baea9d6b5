"""What is refused before a vLLM engine is built; only what is marked so imports vLLM."""

import importlib.util
import re

import pytest
import torch
from peft import LoraConfig

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.formats.kernels import gemm
from lit_qrl.network.structure import outline
from lit_qrl.rollout.engine import SamplerSpec
from lit_qrl.rollout.vllm import checks as vllm_checks
from lit_qrl.rollout.vllm import cpu as vllm_cpu
from lit_qrl.rollout.vllm.checks import check_processes
from lit_qrl.rollout.vllm.engine import VLLMEngine
from lit_qrl.types import SamplingParams
from tests.families.configs import BY_TYPE
from tests.networks import build_network
from tests.vllm_engines import publish, sampler_format, tiny_network


def test_missing_installation_names_the_remedy(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"not installed.*0\.26.*pip install 'lit-qrl\[vllm\]'"):
        VLLMEngine().validate(SamplerSpec())


def test_experts_in_few_bits_are_refused_and_left_out_or_plain_are_not():
    network = outline(BY_TYPE["qwen3_moe"].config())
    with pytest.raises(ConfigError, match=r"not sent experts in fp8_row.*bf16.*mlp.experts on CPU.*TransformersEngine"):
        vllm_checks.check_experts(network, formats.get("fp8_row"), ())
    vllm_checks.check_experts(network, formats.get("fp8_row"), ["*.experts"])
    vllm_checks.check_experts(network, formats.get("bf16"), ())
    vllm_checks.check_experts(network, None, ())
    vllm_checks.check_experts(build_network(), formats.get("fp8_row"), ())


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: 2"),
        ({"pipeline_parallel_size": 2, "data_parallel_size": 4}, "pipeline_parallel_size: 2, data_parallel_size: 4"),
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend: ray"),
        ({"distributed_executor_backend": "external_launcher"}, "external_launcher"),
    ],
)
def test_engines_over_several_processes_are_refused_before_a_weight_is_loaded(arguments, given):
    with pytest.raises(ConfigError, match=rf"one device.*Given: .*{given}.*publisher\.format"):
        VLLMEngine(engine_args=arguments).validate(SamplerSpec())
    check_processes({"tensor_parallel_size": 1, "distributed_executor_backend": "uni"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is out of range"),
        ({"max_num_seqs": 0}, "max_num_seqs is out of range"),
        ({"max_lora_rank": 24}, "max_lora_rank is out of range.*0 or one of 8, 16"),
    ],
)
def test_arguments_are_checked_at_construction(arguments, message):
    with pytest.raises(ConfigError, match=message):
        VLLMEngine(**arguments)


def test_model_length_must_hold_prompt_and_completion(install):
    install("0.32.0", cpu=True)
    engine = VLLMEngine(max_model_len=100)
    engine.validate(SamplerSpec(prompt_limit=60, sampling=SamplingParams(max_tokens=40)))
    with pytest.raises(ConfigError, match=r"at least 124 \(60 \+ 64 tokens\)\. Given: 100"):
        engine.validate(SamplerSpec(prompt_limit=60, sampling=SamplingParams(max_tokens=64)))
    with pytest.raises(ConfigError, match=r"at least 130 \(90 \+ 40 tokens\)\. Given: 100"):
        engine.validate(SamplerSpec(prompt_limit=60, sequence_limit=130, sampling=SamplingParams(max_tokens=40)))


def test_an_adapter_beside_its_base_needs_room():
    lora = LoraConfig(r=24, target_modules=["q_proj"])
    with pytest.raises(ConfigError, match=r"above the engine's limit.*at least 24\. Given: 0\. Set it to 32"):
        VLLMEngine().validate(SamplerSpec(adapter=lora))


def test_four_bits_under_eight_bit_activations_need_a_gpu(monkeypatch):
    mixed = formats.get("int4_group", activations="fp8")
    with pytest.raises(ConfigError, match="4-bit weights under 8-bit activations"):
        vllm_checks.check_format(mixed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gemm, "capability", lambda index: (9, 0))
    vllm_checks.check_format(mixed)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0)])
def test_four_bits_under_fp8_activations_need_the_gpu_of_vllm_s_kernel(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "Some GPU")
    monkeypatch.setattr(gemm, "capability", lambda index: capability)
    given = rf"Given: Some GPU \({capability[0]}\.{capability[1]}\)\."
    with pytest.raises(ConfigError, match=rf"4-bit weights by FP8.*capability 9\.0\. {given}.*TransformersEngine"):
        vllm_checks.check_format(formats.get("int4_group", activations="fp8"))
    vllm_checks.check_format(formats.get("int4_group"))


def test_a_format_whose_operator_the_build_lacks_is_refused(install, monkeypatch):
    install("0.32.0", cpu=True)
    monkeypatch.setattr(vllm_cpu, "missing_operators", lambda needed: [name for name in needed if "wna16" in name])
    monkeypatch.setattr(vllm_cpu, "int8_product", lambda: (1.0, 1.0))
    message = r"no operator for publisher\.format int4_group.*_C\.cpu_gemm_wna16.*fp8_row.*TransformersEngine"
    engine = VLLMEngine()
    with pytest.raises(ConfigError, match=message):
        engine.validate(SamplerSpec(format=formats.get("int4_group")))
    for name in ("fp8_row", "int8_channel"):
        engine.validate(SamplerSpec(format=formats.get(name)))
    engine.validate(SamplerSpec(format=None))
    with pytest.raises(ConfigError, match=r"no kernel for publisher\.format nf4.*fp8_row.*or use TransformersEngine"):
        engine.validate(SamplerSpec(format=formats.get("nf4")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    vllm_checks.check_operators(formats.get("int4_group"))  # its kernels are others


def test_int8_sums_that_overflow_are_refused(install, monkeypatch):
    install("0.32.0", cpu=True)
    monkeypatch.setattr(vllm_cpu, "missing_operators", lambda needed: [])
    monkeypatch.setattr(vllm_cpu, "int8_product", lambda: (8160.0, 1032256.0))
    message = r"without VNNI.*Expected: 1032256 .*Given: 8160\..*fp8_row.*TransformersEngine"
    with pytest.raises(ConfigError, match=message):
        VLLMEngine().validate(SamplerSpec(format=formats.get("int8_channel")))
    VLLMEngine().validate(SamplerSpec(format=formats.get("fp8_row")))


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["int4_group", "int8_channel"])
def test_what_is_refused_would_go_wrong(name, monkeypatch, built):
    """The refusal is right on this host: without it the engine fails to start, or multiplies with other values."""
    format, network = sampler_format(name), tiny_network()
    try:
        vllm_checks.check_operators(format)
    except ConfigError:
        refused = True
    else:
        refused = False
    engine = built(network, format, refusable=False)
    if refused and name == "int4_group":
        with pytest.raises((AttributeError, ConfigError), match="cpu_gemm_wna16"):  # as it starts, or is published to
            publish(network, engine, format, 0)
    else:
        faults, _, _ = publish(network, engine, format, 0, everywhere=True)
        assert {fault.kind for fault in faults} == ({"gemm"} if refused else set())


@pytest.mark.vllm
def test_the_kernel_s_own_bound_is_the_one_that_is_checked():
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW4A8Fp8

    assert CompressedTensorsW4A8Fp8.get_min_capability() == 90


def test_a_head_in_blocks_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gemm, "capability", lambda index: (9, 0))
    vllm_checks.check_format(formats.get("fp8_row"), head=True)
    vllm_checks.check_format(formats.get("fp8_block"))
    with pytest.raises(ConfigError, match=r"head in fp8_block.*fp8_row.*quantize_head: true.*TransformersEngine"):
        vllm_checks.check_format(formats.get("fp8_block"), head=True)


def test_dtype_is_the_learners_where_kernels_allow():
    learner = torch.float32
    expected = {"fp8_row": learner, "int4_group": torch.bfloat16, "bf16": torch.bfloat16, "fp32": learner}
    for name, dtype in expected.items():
        assert vllm_checks.automatic_dtype(formats.get(name), learner) == dtype
    assert vllm_checks.automatic_dtype(None, torch.float16) == torch.float16


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that there is a GPU of 80 GiB with so much free, of which the learner holds 12 GiB."""

    def pretend(free, spare=0):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * 2**30, 80 * 2**30))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 12 * 2**30)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: (12 + spare) * 2**30)

    return pretend


def test_gpu_memory_is_weighed_before_anything_is_built(gpu):
    gpu(free=30)
    message = r"Expected: 40\.0 GiB free: 40\.0 for .*Given: 30\.0 of 80\.0 GiB free; the learner holds 12\.0.*0\.37"
    with pytest.raises(ConfigError, match=message):
        vllm_checks.check_device_memory(build_network(), 8.0, 0.5)
    vllm_checks.check_device_memory(build_network(), 8.0, 0.3)


def test_gradients_need_memory_beside_an_engine_that_never_sleeps(gpu):
    with torch.device("meta"):
        network = torch.nn.Linear(2**17, 2**15, bias=False, dtype=torch.bfloat16)  # 8 GiB
    gpu(free=45)
    message = r"48\.0 GiB free: 40\.0 for .* 0\.5 and 8\.0 for the learner's gradients.*at most 0\.45.*4\.0 GiB.*sleep"
    with pytest.raises(ConfigError, match=message + r".*AdamW's state .* another 16\.0 GiB"):
        vllm_checks.check_device_memory(network, 8.0, 0.5)
    vllm_checks.check_device_memory(network, 8.0, 0.45)
    vllm_checks.check_device_memory(network, 8.0, 0.5, sleeps=True)
    gpu(free=45, spare=4)  # torch's own reserve can hold half of them
    vllm_checks.check_device_memory(network, 8.0, 0.5)
    network.weight.requires_grad_(False)
    gpu(free=45)
    vllm_checks.check_device_memory(network, 8.0, 0.5)


def test_experts_are_taken_in_the_formats_that_were_verified_on_the_device(monkeypatch, format_rows):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    network, stacked = (outline(BY_TYPE[kind].config()) for kind in ("qwen3_moe", "gpt_oss"))
    for name in ("fp8_row", "fp8_block", "int8_channel", "int4_group", "nvfp4"):
        vllm_checks.check_experts(network, formats.get(name), ())
        with pytest.raises(ConfigError, match=f"not sent experts in {name}.*layers.0.mlp.experts.*on CUDA"):
            vllm_checks.check_experts(stacked, formats.get(name), ())
    others = [formats.get(name) for name in ("fp8_tensor", "mxfp4", "nf4")]
    for other in (*others, formats.get("int4_group", activations="fp8")):
        with pytest.raises(ConfigError, match=f"experts in {other.name}.*bf16, or fp8_row, .*nvfp4, or.*on CUDA"):
            vllm_checks.check_experts(network, other, ())
    format_rows("mxfp4", vllm_experts=("cuda",))
    vllm_checks.check_experts(network, formats.get("mxfp4"), ())


def test_routers_and_plain_experts_are_listed_as_vllm_names_them():
    network = outline(BY_TYPE["mixtral"].config())
    listed = vllm_checks.plain_mixtures(network, ["*.layers.1.*"])
    vllm_names = {
        "model.layers.0.block_sparse_moe.gate": True,
        "model.layers.1.block_sparse_moe.gate": True,
        "model.layers.0.block_sparse_moe.experts.0.gate_proj": False,
        "model.layers.1.block_sparse_moe.experts.0.gate_proj": True,
        "model.layers.1.block_sparse_moe.experts.routed_experts.0.gate_proj": True,
        "model.layers.1.block_sparse_moe.shared_experts.gate_proj": False,
        "model.layers.1.self_attn.qkv_proj": False,
    }
    patterns = [one.removeprefix("re:") for one in listed if one.startswith("re:")]
    assert {name: any(re.match(one, name) for one in patterns) for name in vllm_names} == vllm_names
    assert "model.layers.0.mlp.gate" in listed
    assert vllm_checks.plain_mixtures(build_network(), ()) == []


def test_plain_layers_are_listed_and_fused_ones_stay_together():
    network = build_network()
    assert vllm_checks.plain_layers(network, ()) == ["lm_head"]
    skipped = vllm_checks.plain_layers(network, ["*.down_proj"])
    assert skipped == ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj", "lm_head"]
    with pytest.raises(ConfigError, match=r"splits model\.layers\.0\.self_attn\.qkv_proj.*q_proj.*k_proj.*v_proj"):
        vllm_checks.plain_layers(network, ["*.k_proj"])


def test_layers_that_vllm_holds_as_one_must_share_their_scale():
    known = {"layers.0.qkv_proj": ["layers.0.q_proj", "layers.0.k_proj"], "layers.0.o_proj": ["layers.0.o_proj"]}
    unknown = {"layers.0.wqkv": ["layers.0.wq", "layers.0.wk"]}
    vllm_checks.check_groups(formats.get("nvfp4"), known)
    vllm_checks.check_groups(formats.get("fp8_row"), unknown)  # a scale for each row, of whichever layer
    vllm_checks.check_groups(None, unknown)
    with pytest.raises(ConfigError, match=r"layers\.0\.wq, layers\.0\.wk as one.*FUSED_LAYERS.*TransformersEngine"):
        vllm_checks.check_groups(formats.get("nvfp4"), unknown)


def test_nothing_is_drawn_or_published_before_its_time():
    engine = VLLMEngine(max_lora_rank=8)
    for call in (
        lambda: engine.generate([[1]], 1, 0),
        lambda: engine.score([[1, 2]]),
        lambda: engine.perturb(iter([]), 0),
        lambda: engine.load_adapter(iter([]), 0),
    ):
        with pytest.raises(RuntimeError, match="no complete weights"):
            call()
    with pytest.raises(RuntimeError, match="no policy"):
        engine.load_weights(iter([]), None, 0)
    assert engine.read_back("x") is engine.read_columns("x", [0]) is None
    engine.close()


@pytest.mark.parametrize("given", [{"kv_cache_dtype": "fp8"}, {"speculative_config": {"method": "ngram"}}])
def test_what_vllm_draws_with_other_log_probs_is_refused(given):
    with pytest.raises(ConfigError, match=rf"under {next(iter(given))} was never verified.*Given: "):
        vllm_checks.check_unverified(given)
    vllm_checks.check_unverified({"kv_cache_dtype": "auto"})
