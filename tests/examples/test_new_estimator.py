import importlib
import math
from pathlib import Path

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback

from lit_qrl.callbacks.ais import AIS
from lit_qrl.callbacks.rejection import TokenVeto
from lit_qrl.errors import ConfigError
from lit_qrl.loop.correction import check_combination, combine
from tests.callbacks.corrections import context
from tests.functional.helpers import listed, no_host_sync, spread_out

FOLDER = Path(__file__).parents[2] / "examples" / "new_estimator"


@pytest.fixture
def tempered(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("tempered").TemperedIS


def test_weights_equal_the_loop(tempered):
    given = context()
    with no_host_sync():
        got = tempered(power=0.5, upper=2.0).correct(None, None, given)
    rows = listed(given.log_ratio, given.mask)
    wanted = [[min(math.exp(0.5 * x), 2.0) for x in row] for row in rows]
    torch.testing.assert_close(got.weights, spread_out(wanted, given.mask), rtol=1e-12, atol=0)
    flat = [math.exp(0.5 * x) > 2 for row in rows for x in row]
    assert float(got.metrics["correction/tempered_cut"]) == pytest.approx(sum(flat) / len(flat))
    assert sum(flat) > 0


def test_the_yaml_builds_it_by_its_import_path(tempered):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_argument("--trainer.callbacks", type=list[Callback] | None)
    parsed = parser.parse_args([f"--config={FOLDER / 'config.yaml'}"])
    (callback,) = parser.instantiate(parsed).trainer.callbacks
    assert type(callback) is tempered
    assert (callback.power, callback.upper) == (0.5, 2.0)


def test_it_combines_with_rejections_and_not_with_another_ratio(tempered):
    given = context()
    corrections = [callback.correct(None, None, given) for callback in (tempered(), TokenVeto())]
    weights, keep, metrics = combine(corrections, given.mask)
    assert torch.equal(weights, corrections[0].weights)
    assert torch.equal(keep, corrections[1].keep)
    assert "correction/tempered_cut" in metrics
    check_combination([tempered(), TokenVeto()])
    with pytest.raises(ConfigError, match="TemperedIS and AIS"):
        check_combination([tempered(), AIS()])
