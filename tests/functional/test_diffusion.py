import pytest
import torch

from lit_qrl.functional.diffusion import blocks_of, canvases, gumbel_argmax, masked_estimate


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
