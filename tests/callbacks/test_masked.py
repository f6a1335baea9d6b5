import math

import pytest
import torch

from lit_qrl.callbacks.masked import MaskedIS
from lit_qrl.errors import ConfigError
from lit_qrl.functional import importance as F
from tests.callbacks.corrections import context
from tests.functional.helpers import listed, no_host_sync


@pytest.mark.parametrize(
    "level, function, upper",
    [("token", F.token_masked, 2.0), ("sequence", F.sequence_masked, 5.0), ("geometric", F.geometric_masked, 2.0)],
)
def test_default_band_of_each_level(level, function, upper):
    given = context()
    with no_host_sync():
        got = MaskedIS(level).correct(None, None, given)
    assert torch.equal(got.weights, function(given.log_ratio, given.mask, 1 / upper, upper))
    assert got.keep is None
    rows = [row for row in listed(given.log_ratio, given.mask) if row]
    ratios = {
        "token": [math.exp(x) for row in rows for x in row],
        "sequence": [math.exp(sum(row)) for row in rows],
        "geometric": [math.exp(sum(row) / len(row)) for row in rows],
    }[level]
    name = "correction/masked_tokens" if level == "token" else "correction/masked_sequences"
    assert float(got.metrics[name]) == pytest.approx(sum(not 1 / upper <= r <= upper for r in ratios) / len(ratios))
    assert float(got.metrics[name]) > 0


def test_the_surveys_one_sided_form():
    given = context()
    got = MaskedIS("sequence", lower=0.0, upper=5.0).correct(None, None, given)
    wanted = [math.exp(sum(row)) for row in listed(given.log_ratio, given.mask)]
    for i, ratio in enumerate(wanted):
        assert float(got.weights[i, 0]) == pytest.approx(
            ratio if ratio <= 5 and given.mask[i].any() else float(ratio <= 5)
        )


def test_equal_policies_leave_every_weight_exactly_one():
    for level in ("token", "sequence", "geometric"):
        got = MaskedIS(level).correct(None, None, context(torch.float32, equal=True))
        assert torch.equal(got.weights, torch.ones(8, 6))


@pytest.mark.parametrize(
    "options, word",
    [({"lower": 3.0, "upper": 2.0}, "lower"), ({"upper": 0.5}, "upper >= 1"), ({"level": "word"}, "level of MaskedIS")],
)
def test_bad_input_is_refused_at_construction(options, word):
    with pytest.raises(ConfigError, match=word):
        MaskedIS(**options)
