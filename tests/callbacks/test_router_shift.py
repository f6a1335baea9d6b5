import pytest
import torch

from lit_qrl.callbacks import RouterReplay, RouterShift
from lit_qrl.errors import ConfigError
from lit_qrl.objective import GRPO, TBPO
from tests.callbacks.test_router_replay import column, trained
from tests.tiny_run import configured


def router_logprobs(network, tokens, routes):
    """Of one sequence without padding: what each router gives the experts of `routes`, "n layers k"."""
    seen = []
    gates = [layer.mlp.gate for layer in network.model.layers]
    hooks = [gate.register_forward_hook(lambda module, args, out: seen.append(out[0])) for gate in gates]
    with torch.no_grad():
        network(input_ids=tokens[None])
    for hook in hooks:
        hook.remove()
    given = (layer.log_softmax(-1).gather(1, routes[:, i].long()) for i, layer in enumerate(seen))
    return torch.stack(list(given), dim=1)


@pytest.mark.parametrize("packing", ["auto", "never"])
def test_what_learner_olds_routers_gave_is_kept_and_the_ratio_falls_as_they_move(packing, tmp_path):
    data = {"mini_batches": 2, "micro_batches": 2}
    watching, row, _ = trained(
        tmp_path, RouterReplay(level="old"), RouterShift(floor=0.01), data=data, lr=1e-2, policy={"packing": packing}
    )
    batch = watching.rollout
    before = configured(tmp_path / "model")
    s, t = batch.tokens.shape[1], batch.mask.shape[1]
    for index in range(3):
        length, start = int(batch.total_length[index]), s - t - int(batch.prompt_length[index])
        span = slice(start, start + length - 1)  # nothing is computed of the last token
        expected = router_logprobs(before.network, batch.tokens[index, span], batch.routed_experts[index, span])
        torch.testing.assert_close(batch.router_logprobs[index, span], expected, atol=1e-5, rtol=1e-5)
    # of two updates the first sees routers that have not moved
    assert 0.3 < column(row, "shift") < 0.9999
    assert column(row, "shift_floored") == 0


def test_the_second_updates_ratio_is_smaller_by_the_shift(tmp_path):
    seen = []

    class Kept(GRPO):
        def terms(self, logprobs, batch, entropy):
            seen.append(batch.learner_old_logprobs.clone())
            return super().terms(logprobs, batch, entropy)

    data = {"mini_batches": 2, "micro_batches": 1}
    watching, row, _ = trained(
        tmp_path, RouterReplay(level="old"), RouterShift(floor=0.5), data=data, lr=1e-2, objective=Kept()
    )
    parts = [part.batch for part, _ in watching.forwards]
    moved = [(old - part.learner_old_logprobs)[part.mask] for old, part in zip(seen, parts, strict=True)]
    assert moved[0].abs().max() < 1e-5
    assert 1e-4 < moved[1].mean() <= -torch.tensor(0.5).log()
    assert (moved[1] >= 0).all()
    ratio = torch.cat([(-one).exp() for one in moved]).mean()
    assert column(row, "shift") == pytest.approx(float(ratio), rel=1e-4)


@pytest.mark.parametrize(
    "replay, mini_batches, objective, match",
    [
        ([], 2, None, "nothing replays them.*RouterReplay"),
        ([RouterReplay()], 1, None, "which is 1 here.*mini_batches above 1"),
        ([RouterReplay()], 2, TBPO(), "TBPO takes learner_old's log-probs for the mismatch"),
        ([RouterReplay()], 2, GRPO(old_logprobs="bypass"), "old_logprobs: decoupled"),
    ],
)
def test_what_it_needs_is_named(replay, mini_batches, objective, match, tmp_path):
    with pytest.raises(ConfigError, match=match):
        trained(tmp_path, *replay, RouterShift(), data={"mini_batches": mini_batches}, objective=objective)
