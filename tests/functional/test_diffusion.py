import math

import pytest
import torch

from lit_qrl.functional.diffusion import blocks_of, canvases, confidence, gumbel_argmax, masked_estimate, most_confident


def test_gumbel_noise_is_the_published_form():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(50, 9, generator=generator, dtype=torch.float64)
    logits[:, 4] = float("-inf")
    uniform = torch.rand(50, 9, generator=generator, dtype=torch.float64)
    for temperature in (0.2, 1.0, 2.0):
        published = logits.exp() / (-uniform.log()) ** temperature
        assert torch.equal(gumbel_argmax(logits, uniform, temperature), published.argmax(-1))
    # without noise the first of equal scores is taken
    logits = torch.tensor([[0.0, 3.0, 3.0]])
    assert gumbel_argmax(logits, None, 1.0).tolist() == [1]
    assert gumbel_argmax(logits, torch.rand(1, 3), 0.0).tolist() == [1]
    with pytest.raises(ValueError, match="negative"):
        gumbel_argmax(logits, None, -1.0)


def test_confidence_is_a_probability_at_temperature_one():
    logits = torch.tensor([[0.3, -1.0, 2.0]], dtype=torch.float64)
    scale = sum(math.exp(z) for z in (0.3, -1.0, 2.0))
    got = confidence(logits, torch.tensor([0]))
    torch.testing.assert_close(got, torch.tensor([math.exp(0.3) / scale], dtype=torch.float64))
    assert confidence(logits.bfloat16(), torch.tensor([0])).dtype == torch.float32


def slowly(sure, masked, count):
    """The positions of one row, one after the other: the surest that is left, the leftmost of several."""
    chosen = []
    for _ in range(count):
        best = None
        for i, value in enumerate(sure):
            if masked[i] and i not in chosen and (best is None or value > sure[best]):
                best = i
        if best is not None:
            chosen.append(best)
    return [i in chosen for i in range(len(sure))]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_surest_positions_are_unmasked_ties_from_the_left(count):
    generator = torch.Generator().manual_seed(count)
    sure = torch.randint(4, (200, 12), generator=generator) / 4  # few values, so that most rows have ties
    masked = torch.rand(200, 12, generator=generator) < 0.5
    got = most_confident(sure, masked, count)
    assert got.tolist() == [slowly(*row, count) for row in zip(sure.tolist(), masked.tolist(), strict=True)]
    assert (got.sum(1) == masked.sum(1).clamp(max=count)).all()


def test_blocks_go_from_left_to_right():
    assert [(part.start, part.stop) for part in blocks_of(6, 2)] == [(0, 2), (2, 4), (4, 6)]
    for length, block in ((7, 2), (6, 0)):
        with pytest.raises(ValueError, match="fill"):
            blocks_of(length, block)


def test_views_of_a_completion_that_ended_early():
    """What stands right of its last token is masked, and blocks behind it are not scored."""
    prompt, completion = torch.tensor([[5, 6]]), torch.tensor([[7, 8, 9]])
    hidden = torch.tensor([[False, True]])
    (one, part), *rest = canvases(prompt, completion, 6, hidden, 0)
    assert (one.tolist(), part, rest) == ([[5, 0, 0, 0, 0, 0, 0, 0]], slice(0, 3), [])
    views = list(canvases(prompt, completion, 6, hidden, 0, block=2))
    assert [view.tolist() for view, _ in views] == [[[5, 0, *[0] * 6]], [[5, 0, 7, 8, 0, 0, 0, 0]]]
    assert [part for _, part in views] == [slice(0, 2), slice(2, 3)]
    with pytest.raises(ValueError, match="mask"):
        masked_estimate(lambda canvas, part: None, prompt, completion, 6, hidden[None][:0], 0)
