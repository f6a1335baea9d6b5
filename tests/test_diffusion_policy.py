import json

import peft
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from lit_qrl.diffusion_policy import DiffusionPolicy
from lit_qrl.errors import ConfigError
from lit_qrl.network.llada import LLaDAForMaskedDiffusion
from lit_qrl.network.padding_free import is_padding_free
from lit_qrl.policy import CausalPolicy
from tests.network.test_denoising import COMPLETIONS, PROMPTS, denoised_batch, estimated
from tests.network.test_llada import PUBLISHED, published_weights
from tests.networks import build_denoiser, build_tokenizer
from tests.tiny_run import configured, model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("denoiser"), build_denoiser)


@pytest.fixture(scope="module")
def policy(folder):
    return configured(folder, DiffusionPolicy, masks=2, prompt_masking=0.5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_the_estimates_of_each_row_alone(policy, temperature):
    batch = denoised_batch()
    got = policy(batch, temperature, entropy=True)
    assert got.logprobs.requires_grad
    assert not got.entropy.requires_grad
    assert not is_padding_free(policy.network)
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        masks = policy.estimator.hidden([int(batch.mask_seed[row])], [len(prompt)], len(prompt))[:, 0].tolist()
        each = [estimated(policy.network, prompt, completion, one, temperature=temperature) for one in masks]
        torch.testing.assert_close(
            got.logprobs[row, : len(completion)].detach(), torch.tensor(each).mean(0), atol=1e-4, rtol=1e-4
        )
    assert (got.logprobs[~batch.mask] == 0).all()
    assert (got.entropy[~batch.mask] == 0).all()
    assert (got.entropy[batch.mask] > 0).all()


def test_gradients_are_finite_and_leave_the_mask_tokens_logit_alone(policy):
    policy.zero_grad()
    policy(denoised_batch(), entropy=True, entropy_gradient=True).logprobs.sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in policy.parameters())
    policy.zero_grad()


def test_a_slice_has_the_estimates_of_the_whole(policy):
    batch = denoised_batch()
    whole = policy(batch).logprobs
    part = batch.select(torch.tensor([2, 1]))
    torch.testing.assert_close(policy(part).logprobs[0, 0], whole[2, 0])
    torch.testing.assert_close(policy(part).logprobs[1], whole[1])


def test_other_masks_give_other_estimates(policy):
    batch = denoised_batch()
    again = denoised_batch()
    assert torch.equal(policy(batch).logprobs, policy(again).logprobs)
    again.mask_seed += 100
    assert not torch.equal(policy(batch).logprobs, policy(again).logprobs)


def test_an_adapter_and_its_reference(folder):
    policy = configured(folder, DiffusionPolicy, lora=peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    plain = configured(folder, DiffusionPolicy)
    batch = denoised_batch()
    with policy.reference():
        torch.testing.assert_close(policy(batch).logprobs, plain(batch).logprobs)
    assert not torch.allclose(policy(batch).logprobs, plain(batch).logprobs)


def test_a_llada_folder_loads_without_its_code(tmp_path):
    build_tokenizer(pad_token="<pad>", eos_token="<eos>").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    save_file(published_weights(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    policy = configured(tmp_path, DiffusionPolicy)
    assert type(policy.network) is LLaDAForMaskedDiffusion
    assert policy(denoised_batch()).logprobs.isfinite().all()
    names = dict(policy.named_weights())
    expected = published_weights()["model.transformer.blocks.1.ff_proj.weight"]
    assert torch.equal(names["model.layers.1.mlp.gate_proj.weight"], expected)
    random = configured(tmp_path, DiffusionPolicy, random_weights=True)
    assert type(random.network) is LLaDAForMaskedDiffusion


def test_models_of_the_other_kind_are_refused_before_weights_are_loaded(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    causal = model_folder(tmp_path / "causal")
    with pytest.raises(ConfigError, match="This model is causal"):
        DiffusionPolicy(causal)
    with pytest.raises(ConfigError, match="DiffusionPolicy"):
        CausalPolicy(folder)
    with pytest.raises(ConfigError, match="no mask token"):
        DiffusionPolicy(model_folder(tmp_path / "maskless", build_denoiser, mask_token_id=None))
    for name, value in (("masks", 0), ("prompt_masking", 1.0), ("estimate", "exact"), ("block", 0)):
        with pytest.raises(ConfigError, match=f"policy.{name}"):
            DiffusionPolicy(folder, **{name: value})
