"""The teaching loop learns, and its sampler is the library's."""

import pytest
import torch

from tests.examples.scripts import importing


@pytest.fixture(scope="module")
def loop():
    with importing("") as module:
        yield module("loop")


def test_it_learns_from_an_fp8_sampler(loop, capsys):
    before, after = loop.main(iterations=20)
    assert after > before + 0.03
    kl, ess, alpha = (float(word) for word in capsys.readouterr().out.splitlines()[3].split()[2:])
    assert 1e-5 < kl < 1e-2
    assert 0.9 < ess < 1
    assert 0 < alpha < 1


def test_without_quantization_sampler_and_learner_are_the_same(loop):
    folder = loop.shipped(loop.MODEL)
    tokenizer = loop.AutoTokenizer.from_pretrained(folder)
    learner = loop.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sampler = loop.low_bit_copy(learner, loop.formats.get("fp32"))
    loop.publish(learner, sampler)
    asked, drawn, sampled = loop.draw(sampler, tokenizer, ["3,5,7=22:", "12,5,17=24:"])
    mask = loop.counted(drawn, tokenizer.eos_token_id)
    torch.testing.assert_close(loop.score(learner, asked, drawn)[mask], sampled[mask], rtol=0, atol=1e-5)
