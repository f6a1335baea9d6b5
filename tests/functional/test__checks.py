import math

import pytest
import torch

from lit_qrl.errors import ConfigError
from lit_qrl.functional import _checks as checks

PASS = [
    (checks.check_band, (0.0, 1.0), {}),
    (checks.check_band, (1.0, math.inf), {}),
    (checks.check_divergence, (None, 1e-300), {}),
    (checks.check_above, (0.0,), {"input_clamp": None, "output_clamp": 1e-9}),
    (checks.check_veto, (1e-300,), {}),
    (checks.check_veto, (0.999,), {}),
    (checks.check_ais, (1.0, 1e-9, 1e-9, 0.0, 1e-12, "sequence"), {}),
    (checks.check_clip, (), {"clip_low": 0.0, "clip_high": 5.0, "neg_low": 1.0, "other": None}),
    (checks.check_above, (1.0,), {"dual_clip": 1.001}),
]
FAIL = [
    (checks.check_band, (0.0, 0.999), {}, "1 <= upper.*upper 0.999"),
    (checks.check_band, (0.0, math.nan), {}, "1 <= upper.*upper nan"),
    (checks.check_band, (1.001, 2.0), {}, "lower 1.001, upper 2.0"),
    (checks.check_band, (-0.001, 2.0), {}, "lower -0.001"),
    (checks.check_band, (math.nan, 2.0), {}, "lower nan"),
    (checks.check_divergence, (None, 0.0), {}, "upper > 0"),
    (checks.check_divergence, (None, math.nan), {}, "upper nan"),
    (checks.check_divergence, (0.0, 1.0), {}, "lower: null"),
    (checks.check_above, (0.0,), {"input_clamp": 0.0}, "input_clamp > 0"),
    (checks.check_above, (0.0,), {"output_clamp": math.nan}, "Given: nan"),
    (checks.check_veto, (0.0,), {}, "0 < threshold < 1"),
    (checks.check_veto, (1.0,), {}, "0 < threshold < 1"),
    (checks.check_veto, (math.nan,), {}, "Given: nan"),
    (checks.check_ais, (0.9, 0.02, 1.2, 1.0, 1e-6), {}, "clip of AIS"),
    (checks.check_ais, (5.0, 0.0, 1.2, 1.0, 1e-6), {}, "saturation > 0"),
    (checks.check_ais, (5.0, 0.02, 0.0, 1.0, 1e-6), {}, "tolerance > 0"),
    (checks.check_ais, (5.0, 0.02, 1.2, -0.1, 1e-6), {}, "sensitivity >= 0"),
    (checks.check_ais, (5.0, 0.02, 1.2, 1.0, 0.0), {}, "eps > 0"),
    (checks.check_ais, (5.0, 0.02, 1.2, 1.0, 1e-6, "group"), {}, "level of AIS"),
    (checks.check_clip, (), {"clip_low": 1.001}, "0 <= clip_low <= 1.0"),
    (checks.check_clip, (), {"clip_high": -0.001}, "0 <= clip_high <= inf"),
    (checks.check_clip, (), {"neg_low": math.nan}, "neg_low.*Given: nan"),
    (checks.check_above, (1.0,), {"dual_clip": 1.0}, "dual_clip > 1"),
]


@pytest.mark.parametrize(("check", "args", "named"), PASS)
def test_values_at_the_edge_pass(check, args, named):
    check(*args, **named)


@pytest.mark.parametrize(("check", "args", "named", "message"), FAIL)
def test_values_beyond_it_are_refused(check, args, named, message):
    with pytest.raises(ConfigError, match=message):
        check(*args, **named)


def test_the_lower_bound_is_the_reciprocal_where_none_is_given():
    assert checks.check_band(None, 8.0) == 0.125
    assert checks.check_band(0.3, 8.0) == 0.3
    measured = torch.tensor(4.0)
    assert torch.equal(checks.check_band(None, measured), torch.tensor(0.25))
    assert checks.check_band(0.5, torch.tensor(0.1)) == 0.5  # a measured bound is never looked at
