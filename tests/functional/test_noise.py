import math

import pytest

from lit_qrl.functional.noise import aqn_sigma

SCHEDULES = ["exponential", "linear", "cosine", "logarithmic"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_stages", [2, 3, 10])
def test_ends_are_met_and_stage_zero_is_silent(schedule, num_stages):
    assert aqn_sigma(0, num_stages, 1e-2, 5e-4, schedule) == 0.0
    assert aqn_sigma(1, num_stages, 1e-2, 5e-4, schedule) == 1e-2
    if num_stages > 2:
        assert math.isclose(aqn_sigma(num_stages - 1, num_stages, 1e-2, 5e-4, schedule), 5e-4)


def test_values_of_the_schedules():
    sigmas = [aqn_sigma(k, 10, 1e-2, 5e-4) for k in range(1, 10)]
    for k, sigma in enumerate(sigmas):
        assert math.isclose(sigma, 1e-2 * (5e-4 / 1e-2) ** (k / 8), rel_tol=1e-12)

    assert math.isclose(aqn_sigma(3, 6, 1.0, 0.2, "linear"), 0.6)
    assert math.isclose(aqn_sigma(3, 6, 1.0, 0.2, "cosine"), 0.6)
    assert math.isclose(aqn_sigma(2, 6, 1.0, 0.2, "cosine"), 0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2)
    assert math.isclose(aqn_sigma(3, 6, 1.0, 0.2, "logarithmic"), 1.0 - 0.8 * math.log(3) / math.log(5))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, 1, 1e-2, 5e-4), "num_stages"),
        ((10, 10, 1e-2, 5e-4), "stage"),
        ((-1, 10, 1e-2, 5e-4), "stage"),
        ((1, 10, 0.0, 5e-4), "start"),
        ((1, 10, 1e-2, -1.0), "end"),
        ((1, 10, 1e-2, math.nan), "end"),
        ((1, 10, 1e-2, 5e-4, "step"), "step"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(Exception, match=message):
        aqn_sigma(*arguments)
