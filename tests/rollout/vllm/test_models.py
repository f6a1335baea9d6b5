"""Which models an engine refuses before their weights are loaded, asked of vLLM."""

import dataclasses
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import LlamaConfig
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError

from lit_qrl.errors import ConfigError
from lit_qrl.network.structure import outline
from lit_qrl.rollout.engine import SamplerSpec
from lit_qrl.rollout.vllm import models as vllm_models
from lit_qrl.rollout.vllm.engine import VLLMEngine
from tests.families.configs import BY_TYPE, random_network
from tests.families.vllm_cells import of_the_table, sized
from tests.networks import build_network

pytestmark = pytest.mark.vllm


class _UnknownForCausalLM(torch.nn.Module):
    pass


def test_model_type_that_vllm_lacks_is_named():
    vllm_models.check_model(build_network(head_dim=32))
    with pytest.raises(ConfigError, match=r"does not know the model type _UnknownForCausalLM.*TransformersEngine"):
        vllm_models.check_model(_UnknownForCausalLM())


def test_a_model_whose_loader_writes_past_the_reload_is_named():
    with pytest.raises(
        ConfigError, match=r"GptOssForCausalLM writes experts and attention sinks past.*TransformersEngine"
    ):
        vllm_models.check_model(outline(BY_TYPE["gpt_oss"].config()))


@pytest.mark.parametrize("size", [8, 16, 40, 144])
def test_head_size_that_vllm_has_no_kernel_for_on_cpu_is_named(size):
    with pytest.raises(
        ConfigError,
        match=rf"attention of this Qwen3.*head size among 32, 64, 80, .*Given: {size}\. Use a GPU, or use Tra",
    ):
        vllm_models.check_model(build_network(head_dim=size))


def test_head_size_follows_from_the_hidden_size_and_matters_on_cpu_alone(monkeypatch):
    network = build_network(LlamaConfig, head_dim=None, hidden_size=64)
    with pytest.raises(ConfigError, match="Given: 16"):
        vllm_models.check_model(network)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    vllm_models.check_model(network)


def test_head_size_is_checked_before_the_engine_starts():
    engine = VLLMEngine()
    with pytest.raises(ConfigError, match="Given: 16"):
        engine.setup(SamplerSpec(), SimpleNamespace(network=build_network(head_dim=16)))
    assert engine.llm is None


def test_a_model_whose_code_cannot_be_imported_names_the_package(monkeypatch):
    absent = ModuleNotFoundError("No module named 'torchvision'", name="torchvision")
    for error, said in (
        (absent, r"cannot load it here: No module named 'torchvision'.*Install torchvision"),
        (RuntimeError("operator torchvision::nms is gone"), r"nms is gone\. Expected: .* built for the torch"),
    ):
        monkeypatch.setattr(vllm_models, "_class_of", Mock(side_effect=error))
        with pytest.raises(ConfigError, match=said):
            vllm_models.check_model(build_network(head_dim=32))


def test_a_norm_that_vllm_computes_by_groups_is_named():
    family = BY_TYPE["mamba2"]
    if of_the_table((0, 29)):
        vllm_models.check_model(random_network(family))
    grouped = dataclasses.replace(family, options={**family.options, "n_groups": 2})
    with pytest.raises(ConfigError, match=r"each group of Mamba2ForCausalLM's channels.*n_groups: 1.*Given: 2"):
        vllm_models.check_model(random_network(grouped))


def test_chunks_that_end_inside_a_block_of_keys_are_named():
    family = BY_TYPE["llama4_text"]
    with pytest.raises(ConfigError, match=r"a multiple of 128\. Given: 16\. Use a GPU"):
        vllm_models.check_model(random_network(family))
    aligned = dataclasses.replace(family, options={**family.options, "attention_chunk_size": 256})
    vllm_models.check_model(random_network(aligned))


def test_latent_attention_of_another_size_than_the_kernels_is_named():
    family = BY_TYPE["deepseek_v3"]
    if not of_the_table((0, 29)):
        with pytest.raises(ConfigError, match=r"Expected: vLLM 0\.29"):
            vllm_models.check_model(random_network(family))
        return
    with pytest.raises(ConfigError, match=r"as DeepSeek-V3 has, 512 and 64.*Given: \(128, 16\)\. Use a GPU"):
        vllm_models.check_model(random_network(family))
    options = {**family.options, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    vllm_models.check_model(random_network(dataclasses.replace(family, options=options)))


def test_models_with_a_state_are_known_by_their_class():
    kinds = ("Mamba2ForCausalLM", "Lfm2ForCausalLM", "Qwen3ForCausalLM")
    assert [vllm_models.recurrent(name) for name in kinds] == [True, True, False]


def test_what_vllm_says_of_a_first_engine_is_one_paragraph():
    network = outline(BY_TYPE["gpt_oss"].config())
    found = vllm_models.refused_model(network, KeyError("factor"))
    assert isinstance(found, ConfigError)
    assert "does not build an engine of GptOssForCausalLM with these arguments: KeyError: 'factor'" in str(found)
    ambiguous = AmbiguousGlobalPerLayerAttributeError("head_dim")
    assert isinstance(vllm_models.refused_model(network, ambiguous), ConfigError)
    memory = RuntimeError("out of memory")
    assert vllm_models.refused_model(network, memory) is memory
    assert str(found).endswith("or use TransformersEngine.")
    state = vllm_models.refused_model(outline(BY_TYPE["mamba2"].config()), KeyError("factor"))
    assert str(state).endswith("Change what it names, take another version of vLLM.")  # the other engine has no state


def test_linear_attention_on_a_cpu_wants_bf16_and_one_size(monkeypatch):
    with pytest.raises(ConfigError, match=r"as Qwen3-Next has, 128 and 128\. Given: \(32, 32\)\. Use a GPU\."):
        vllm_models.check_model(random_network(BY_TYPE["qwen3_next"]))
    network = random_network(sized(BY_TYPE["qwen3_next"]))
    with pytest.raises(ConfigError, match=r"Expected: data\.engine\.dtype: bf16\. Given: torch\.float32"):
        vllm_models.check_model(network, torch.float32)
    if not of_the_table((0, 29)):
        with pytest.raises(ConfigError, match=r"Expected: vLLM 0\.29\. Given: one without kernels of states"):
            vllm_models.check_model(network, torch.bfloat16)
        return
    vllm_models.check_model(network, torch.bfloat16)
    vllm_models.check_model(build_network(head_dim=32), torch.float32)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    vllm_models.check_model(network, torch.float32)
