"""A command of the Trainer on rows of sums."""

import pytest
import yaml
from lightning.pytorch.accelerators import CUDAAccelerator

from tests.command_line import nested, status_of
from tests.tiny_run import model_folder, on_sums


@pytest.fixture
def lit(tmp_path, monkeypatch, capfd, caplog):
    """Return (status, what was printed) of a command on rows of sums, in an empty folder with `sums.yaml`."""
    options = {**on_sums(tmp_path, model_folder(tmp_path / "model")), "report.samples_per_iteration": 1}
    del options["trainer.default_root_dir"]
    (tmp_path / "sums.yaml").write_text(yaml.safe_dump(nested(options)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: False))
    monkeypatch.setattr("lit_qrl.callbacks.report.render", lambda folder: None)  # drawing takes seconds

    def lit(command, *args):
        capfd.readouterr()
        caplog.clear()
        status = status_of([command, "--config", "sums.yaml", *args])
        printed = capfd.readouterr()
        return status, " ".join((printed.out + printed.err + caplog.text).split())

    return lit
