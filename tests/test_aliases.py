"""The classes that YAML of version 0.1.0 could name, by the module paths of that time."""

import re
import sys
from importlib import import_module, reload
from importlib.util import find_spec
from pathlib import Path

import pytest

from lit_qrl.aliases import MOVED, current
from tests.command_line import status_of

ROOT = Path(__file__).parents[1]
SAVED = ROOT / "tests" / "saved_config.yaml"
CLASSES = {
    "callbacks.ais": "AIS",
    "callbacks.aqn": "AQNNoise",
    "callbacks.base": "RLCallback",
    "callbacks.checkpoint": "RunCheckpoint",
    "callbacks.geometric": "GeometricRejection",
    "callbacks.guard": "Guard",
    "callbacks.masked": "MaskedIS",
    "callbacks.mismatch": "MismatchMonitor",
    "callbacks.opsm": "OffPolicySequenceMask",
    "callbacks.progress": "RLProgress",
    "callbacks.publisher": "WeightPublisher",
    "callbacks.report": "Report",
    "callbacks.truncated": "TruncatedIS",
    "callbacks.veto": "TokenVeto",
    "data.tasks.countdown": "Countdown",
    "data.tasks.dataset": "DatasetTask",
    "data.tasks.sudoku": "Sudoku",
    "precision.base": "QuantizedPrecision",
    "precision.formats.base": "NumberFormat",
    "precision.formats.dense": "BF16 Dense FP16 FP32",
    **{f"precision.formats.{name.lower()}": name for name in ("MXFP4", "NF4", "NVFP4")},
    **{f"precision.formats.fp8_{name.lower()}": f"FP8{name}" for name in ("Block", "Row", "Tensor")},
    "precision.formats.int4_group": "Int4Group",
    "precision.formats.int8_channel": "Int8Channel",
    "precision.lora4bit": "NVFP4LoRA",
    "precision.qat": "QATAligned",
    "precision.unified_fp8": "UnifiedFP8",
    **{f"rewards.{name.lower()}": f"{name}Reward" for name in ("Constant", "Countdown", "Format", "Math", "Sudoku")},
    "rewards.base": "Reward",
    "rollout.engine": "RolloutEngine",
    "rollout.transformers": "TransformersEngine",
    "rollout.vllm": "VLLMEngine",
    "strategies.colocated": "ColocatedStrategy",
}
for _module, _names in list(CLASSES.items()):  # a package had what its files had
    _package = _module.rpartition(".")[0]
    CLASSES[_package] = f"{CLASSES.get(_package, '')} {_names}"
CLASSES |= {
    "callbacks.predictions": "Predictions",
    "data.task": "Task",
    "loggers": "RunCSVLogger",
    "objective": "CISPO DAPO DrGRPO DualClipGRPO GRPO GSPO Objective PositiveGRPO SAPO TBPO",
    "optim": "MuonAdamW",
    "policy": "CausalPolicy",
}


@pytest.fixture
def unseen(monkeypatch):
    """Forget the old paths that other tests have imported, so that their lines are printed again."""
    for name in [name for name in sys.modules if current(name) != name]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_is_the_module_of_today(old):
    new = f"lit_qrl.{MOVED[old]}"
    assert current(new) == new, "a target is no alias itself"
    assert find_spec(new), "it exists"
    path = ROOT / "lit_qrl" / old.replace(".", "/")
    assert not path.is_dir(), "what exists is not hidden"
    assert not path.with_suffix(".py").exists()
    assert import_module(f"lit_qrl.{old}") is import_module(new)


@pytest.mark.parametrize("module", CLASSES)
def test_every_class_is_where_it_was(module):
    for name in CLASSES[module].split():
        found = getattr(import_module(f"lit_qrl.{module}"), name)
        assert isinstance(found, type)
        assert found.__name__ == name
        assert current(found.__module__) == found.__module__


@pytest.mark.usefixtures("unseen")
def test_one_line_names_the_new_path_and_python_s_own_record_stays(caplog):
    from lit_qrl.callbacks.base import RLCallback

    from lit_qrl.loop import hooks

    import_module("lit_qrl.callbacks.base")
    assert RLCallback is hooks.RLCallback
    assert caplog.messages == ["lit_qrl.callbacks.base is now lit_qrl.loop.hooks."]
    assert hooks.__spec__.name == hooks.__name__ == "lit_qrl.loop.hooks"
    import lit_qrl.loggers

    assert reload(lit_qrl.loggers).__name__ == f"lit_qrl.{MOVED['loggers']}"


@pytest.mark.usefixtures("unseen")
def test_what_lies_in_a_package_moves_with_it(caplog):
    found = import_module("lit_qrl.precision.formats.support")
    assert found is import_module("lit_qrl.formats.support")
    assert current("lit_qrl.precision.formatsx") == "lit_qrl.precision.formatsx"
    assert current("other.precision.formats") == "other.precision.formats"


def test_a_path_that_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"lit_qrl\.nothing"):
        import_module("lit_qrl.nothing")
    with pytest.raises(ModuleNotFoundError, match=r"lit_qrl\.formats\.nothing"):
        import_module("lit_qrl.precision.formats.nothing")


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("engine", ["VLLMEngine", "TransformersEngine"])
def test_a_saved_configuration_is_read_and_printed_with_new_paths(engine, capsys, caplog, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["fit", "--config", str(SAVED), "--print_config"]
    if engine == "TransformersEngine":
        words += ["--data.engine", "lit_qrl.rollout.transformers.TransformersEngine"]
    assert not status_of(words)
    printed = capsys.readouterr().out
    paths = re.findall(r"class_path: (lit_qrl\.[\w.]+)", printed)
    assert {path.rpartition(".")[2] for path in paths} == {
        *("AIS", "CausalPolicy", "ColocatedStrategy", "Countdown", "CountdownReward", "GRPO", "Int4Group", "NVFP4LoRA"),
        engine,
    }
    for path in paths:
        assert current(path) == path
    assert {"lit_qrl.formats.Int4Group", "lit_qrl.formats.int4_group.Int4Group"} < {*paths}
    lines = [record.message for record in caplog.records if record.name == "lit_qrl.aliases"]
    assert len(lines) == len(set(lines))
    assert {*lines} >= {
        "lit_qrl.precision.lora4bit is now lit_qrl.precision.packed_lora.",
        "lit_qrl.precision.formats is now lit_qrl.formats.",
        "lit_qrl.precision.formats.int4_group is now lit_qrl.formats.int4_group.",
    }
    moved = "lit_qrl.rollout.transformers is now lit_qrl.rollout.embedded.engine."
    assert (moved in lines) == (engine == "TransformersEngine")
