import pytest
import torch

from lit_qrl.network.denoising import Layout
from lit_qrl.network.structure import cached
from lit_qrl.rollout.diffusion.stack import CanvasCache
from tests.networks import build_denoiser


@pytest.mark.parametrize("prompts", [[4, 4], [4, 2]])
def test_columns_that_did_not_change_can_be_left_out(prompts):
    """With the same tokens as in the whole forward, a forward of some columns computes what the whole one does."""
    network = build_denoiser()
    layout = Layout.of(prompts, [6, 6], 4, 6, torch.device("cpu"))
    tokens = torch.randint(2, 20, (2, 10), generator=torch.Generator().manual_seed(0))
    cache = CanvasCache(2, 10)
    options = cached(network, cache)
    with torch.no_grad():
        whole = layout.states(network, tokens, **options)
        torch.testing.assert_close(whole, layout.states(network, tokens))
        for first, stop in ((4, 7), (6, 10), (9, 10)):
            cache.at = torch.arange(first, stop)
            part = layout.states(network, tokens[:, first:stop], cache.at, **options)
            torch.testing.assert_close(part, whole[:, first:stop], atol=1e-5, rtol=1e-5)


def test_renewed_columns_are_seen_by_later_forwards():
    network = build_denoiser()
    layout = Layout.of([4], [6], 4, 6, torch.device("cpu"))
    tokens = torch.arange(2, 12)[None]
    cache = CanvasCache(2, 10)
    options = cached(network, cache)
    with torch.no_grad():
        layout.states(network, tokens, **options)
        memory = cache.layers[0].keys
        cache.at = last = torch.tensor([8, 9])
        before = layout.states(network, tokens[:, 8:], last, **options)
        cache.at = torch.arange(4, 8)
        layout.states(network, tokens[:, 4:8] + 5, cache.at, **options)
        cache.at = last
        after = layout.states(network, tokens[:, 8:], last, **options)
        cache.at = None
        again = layout.states(network, tokens, **options)
        expected = layout.states(network, tokens)
    assert (before - after).abs().max() > 1e-3
    torch.testing.assert_close(again, expected)
    assert cache.layers[0].keys is memory  # nothing is allocated anew
    assert (cache.get_seq_length(), cache.layers[0].get_max_length()) == (0, 10)
