import pytest

from lit_qrl.functional.loss_models import AUDIT, EARLY
from lit_qrl.functional.loss_odds import CORRECTIONS, audit_inputs


def test_more_mismatch_has_worse_odds_and_weights_by_sequence_better_ones():
    odds = {
        name: [AUDIT.probability(audit_inputs(distance, *given)) for distance in (0.01, 0.1, 0.5)]
        for name, given in CORRECTIONS.items()
    }
    assert all(there == sorted(there) for there in odds.values())
    assert all(none > sequence for none, sequence in zip(odds["none"], odds["sequence"], strict=True))


@pytest.mark.parametrize("model", [AUDIT, EARLY])
def test_the_middle_of_the_fitted_runs_is_inside_of_them(model):
    middle = dict(zip(model.inputs, model.center, strict=True))
    assert model.outside(middle) == []
    assert model.log_odds(middle) == model.constant
