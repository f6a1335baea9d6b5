import pytest
import torch

from lit_qrl.rollout.embedded import sampler as scoring
from tests.networks import build_network
from tests.rollout.embedded.test_engine import engine_of

SEQUENCES = [[5, 6, 7, 8, 9, 2], [4, 4], [3, 3, 12, 1], [10, 11, 6]]


@pytest.mark.parametrize("rounded", [False, True])
def test_scores_are_those_of_each_sequence_alone_however_few_fit_at_once(rounded, monkeypatch):
    network = build_network()
    engine = engine_of(network, kv_cache_dtype="fp8" if rounded else "auto")
    engine._scales = torch.full((len(network.model.layers), 2), 1e-3) if rounded else None
    together, plain = engine.score(SEQUENCES), engine_of(network).score(SEQUENCES)
    monkeypatch.setattr(scoring, "SCORE_TOKENS", 7)
    apart = engine.score(SEQUENCES)
    for index, sequence in enumerate(SEQUENCES):
        assert together[index].shape == (len(sequence) - 1,)
        torch.testing.assert_close(together[index], apart[index], atol=1e-5, rtol=0)
        if not rounded:
            with torch.no_grad():
                logits = network(torch.tensor([sequence])).logits[0, :-1]
            wanted = logits.log_softmax(-1).gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
            torch.testing.assert_close(together[index], wanted, atol=1e-5, rtol=0)
    differences = torch.cat([a - b for a, b in zip(together, plain, strict=True)]).abs()
    assert (differences.max() > 1e-4) == rounded
