"""What ships: it lies in the wheel, and is found by its name where the working directory has nothing of that name."""

import shutil
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from lit_qrl.cli.config_files import config_files, expanded
from lit_qrl.cli.main import main
from lit_qrl.errors import ConfigError
from lit_qrl.shipped import SHIPPED

ROOT = Path(__file__).parents[1]


def test_the_wheel_holds_every_configuration_policy_and_page():
    held = {one.distribution_path for one in WheelBuilder(str(ROOT)).recurse_included_files()}
    wanted = [
        *ROOT.glob("configs/**/*.yaml"),
        *ROOT.glob("models/*/*"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("docs/studies/*.md"),
    ]
    assert len(wanted) > 150
    shipped = {f"lit_qrl/_data/{path.relative_to(ROOT)}" for path in wanted}
    assert "lit_qrl/_data/models/tiny-countdown/model.safetensors" in shipped
    assert {path for path in held if not path.startswith("lit_qrl/") or "/_data/" in path} == shipped
    assert {f"lit_qrl/{path.relative_to(ROOT / 'lit_qrl')}" for path in ROOT.glob("lit_qrl/**/*.py")} <= held


def test_the_quickstart_is_a_fit_of_what_ships(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = []
    monkeypatch.setattr("lit_qrl.cli.main.run_training", given.extend)
    main(["quickstart", "--trainer.max_epochs", "3"])
    assert given == ["fit", "--config", "configs/quickstart.yaml", "--trainer.max_epochs", "3"]
    assert list(config_files(expanded(given))) == [str(SHIPPED / "configs" / "quickstart.yaml")]


def test_the_working_directory_comes_before_what_ships(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = ["fit", "--config", "configs/recipes/llada_gsm8k_fp8_ais.yaml"]
    files = list(config_files(expanded(recipe)))
    assert str(SHIPPED / "configs" / "correction" / "ais.yaml") in files
    shutil.copytree(SHIPPED / "configs", "configs")
    own = list(config_files(expanded(recipe)))
    assert own == [str(Path(file).relative_to(SHIPPED)) for file in files]
    shutil.rmtree("configs/correction")
    assert str(SHIPPED / "configs" / "correction" / "ais.yaml") in config_files(expanded(recipe))
    with pytest.raises(ConfigError, match=r"Did you mean 'configs/correction/tis\.yaml'\?"):
        expanded(["fit", "--config", "configs/correction/tiss.yaml"])
