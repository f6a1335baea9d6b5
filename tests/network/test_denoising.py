import pytest
import torch
from transformers import LlamaConfig

from lit_qrl.errors import ConfigError
from lit_qrl.network.denoising import (
    Estimator,
    check_causal,
    check_denoises,
    denoises,
    is_denoiser,
    without_mask_token,
)
from tests.default_dtype import bf16_default
from tests.networks import MASK, batch_of, build_denoiser

PROMPTS = [[5, 6, 7, 8, 9], [4], [3, 3, 12]]
COMPLETIONS = [[4, 5, 1], [6, 7, 8, 9], [1]]
LENGTH, BLOCK = 6, 2


@pytest.fixture(scope="module")
def network():
    return build_denoiser()


def denoised_batch():
    batch = batch_of(PROMPTS, COMPLETIONS)
    batch.mask_seed, batch.drawn_over = torch.tensor([11, 12, 13]), torch.full((len(PROMPTS),), LENGTH)
    return batch


def estimated(network, prompt, completion, hidden, length=LENGTH, block=None, temperature=1.0):
    """One row alone, without padding, position by position, in fp64."""
    shown = [MASK if one else token for one, token in zip(hidden, prompt, strict=True)]
    found = []
    for place, token in enumerate(completion):
        known = 0 if block is None else place // block * block
        canvas = [*shown, *completion[:known], *[MASK] * (length - known)]
        with torch.no_grad():
            logits = network(torch.tensor([canvas])).logits[0, len(prompt) + place].double() / temperature
        logits[MASK] = float("-inf")
        found.append(float(logits.log_softmax(0)[token]))
    return found


def log_softmax_head(network):
    def head(hidden, tokens):
        logits = network.lm_head(hidden).double()
        logits[..., MASK] = float("-inf")
        return logits.log_softmax(-1).gather(-1, tokens[..., None])[None, ..., 0]

    return head


def test_which_models_denoise(network):
    causal = LlamaConfig()
    assert denoises(network.config)
    assert not denoises(causal)
    check_denoises(network.config)
    check_causal(causal)
    with pytest.raises(ConfigError, match="DiffusionPolicy"):
        check_causal(network.config)
    with pytest.raises(ConfigError, match=r"causal.*CausalPolicy"):
        check_denoises(causal)
    for mask in (None, 99):
        with pytest.raises(ConfigError, match=r"no mask token.*126336"):
            check_denoises(LlamaConfig(is_causal=False, mask_token_id=mask, vocab_size=50))


def test_a_folder_says_what_it_is(network, tmp_path):
    network.config.save_pretrained(tmp_path / "denoiser")
    LlamaConfig().save_pretrained(tmp_path / "causal")
    found = [is_denoiser(str(tmp_path / name)) for name in ("denoiser", "causal", "nothing")]
    assert found == [True, False, False]


def test_masks_of_the_prompt_follow_from_the_row_alone():
    estimator = Estimator(masks=3, prompt_masking=0.4)
    together = estimator.hidden([7, 8], [4, 60], 60)
    alone = estimator.hidden([7], [4], 9)
    assert torch.equal(together[:, 0, -4:], alone[:, 0, -4:])
    assert not together[:, 0, :-4].any()
    assert not alone[:, 0, :-4].any()
    assert not torch.equal(together[0, 1], together[1, 1])
    many = Estimator(prompt_masking=0.15).hidden([1], [40_000], 40_000)
    assert abs(float(many.float().mean()) - 0.15) < 0.01
    assert not Estimator(prompt_masking=0.0).hidden([1], [50], 50).any()


@pytest.mark.parametrize(("kind", "attention"), [("one_step", "sdpa"), ("one_step", "eager"), ("blocks", "sdpa")])
def test_estimates_are_those_of_each_row_alone(kind, attention):
    network = build_denoiser(attn_implementation=attention)
    estimator = Estimator(kind=kind, block=BLOCK, masks=2, prompt_masking=0.5)
    batch = denoised_batch()
    with torch.no_grad():
        got = estimator(network, log_softmax_head(network), batch)[0]
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        masks = estimator.hidden([int(batch.mask_seed[row])], [len(prompt)], len(prompt))[:, 0].tolist()
        block = BLOCK if kind == "blocks" else None
        each = torch.tensor([estimated(network, prompt, completion, one, block=block) for one in masks])
        torch.testing.assert_close(got[row, : len(completion)].float(), each.mean(0), atol=1e-4, rtol=1e-4)


def test_a_batch_of_a_causal_sampler_is_refused(network):
    batch = denoised_batch()
    batch.mask_seed = None
    with pytest.raises(ValueError, match="DiffusionEngine"):
        Estimator()(network, log_softmax_head(network), batch)


def test_the_mask_token_is_no_word():
    bias = torch.tensor([1.0, 2.0, 3.0])
    assert without_mask_token(bias, torch.zeros(3, 2), 0).tolist() == [float("-inf"), 2, 3]
    assert bias.tolist() == [1, 2, 3]


def test_masks_are_the_sampler_s_while_the_learner_computes_in_bf16():
    estimator, given = Estimator(prompt_masking=0.15), (range(200), [40] * 200, 40)
    expected = estimator.hidden(*given)
    with bf16_default():  # around the learner's passes alone; the sampler estimates outside of them
        assert torch.equal(estimator.hidden(*given), expected)
