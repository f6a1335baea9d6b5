"""Module paths of version 0.1.0, and the classes that its YAML could name by them."""

import re
import sys
from importlib import import_module, reload
from importlib.util import find_spec
from pathlib import Path

import pytest

from lit_qrl.aliases import MOVED, current
from lit_qrl.cli.main import main

ROOT = Path(__file__).parents[1]
SAVED = ROOT / "tests" / "saved_config.yaml"
OLD = {
    "": "callbacks cli commands config_files data errors events functional identity loggers metrics module "
    "objective optim parser_errors policy precision publish_errors report rewards rollout run_config "
    "run_folder seeding strategies trainer_errors training_cli types",
    "callbacks": "_apart _restarts _scores _sources _updates _weighting ais aqn base checkpoint geometric guard masked "
    "mismatch opsm predictions progress publisher report truncated veto",
    "commands": "audit export parser quantize report runs",
    "data": "dataset dealing module sources task tasks",
    "data.tasks": "countdown countdown_solver dataset sudoku",
    "functional": "_checks _compile _statistics adaptive advantage diagnostics importance logprobs mismatch noise "
    "objective penalty reduction",
    "precision": "awq base block_fp8 calibration checkpoint deferred export formats fp8_support fused_blocks "
    "kernel_choice lora4bit lora_linear packed packed_linear qat quantize sampler_kernels shared surgery "
    "unified_fp8",
    "precision.formats": "activations base configs dense fp4_triton fp8_block fp8_row fp8_tensor fused fused_triton "
    "gemm int4_group int8_channel mxfp4 nf4 numerics nvfp4 tiles_triton values_triton",
    "report": "comparison figures histograms page run single",
    "rewards": "answers base constant countdown equivalence format math normalize sudoku units workers",
    "rollout": "adapter attention cache checksum checksum_triton decode engine loading network packing probe receipt "
    "sampling transformers vllm vllm_adapter vllm_blame vllm_checks vllm_compat vllm_cpu vllm_direct "
    "vllm_dummy vllm_folder vllm_marlin vllm_nf4 vllm_places vllm_requests vllm_shared vllm_sleep "
    "vllm_watchdog vllm_weights warm_up",
    "strategies": "colocated offload",
}
"""Modules by package; the first is `lit_qrl` itself."""
FORMATS = "BF16 FP16 FP32 FP8Block FP8Row FP8Tensor Int4Group Int8Channel MXFP4 NF4 NVFP4"
CORRECTIONS = "AIS GeometricRejection MaskedIS OffPolicySequenceMask TokenVeto TruncatedIS"
CLASSES = {
    "callbacks": f"{CORRECTIONS} AQNNoise Guard MismatchMonitor RLCallback RLProgress Report RunCheckpoint "
    "WeightPublisher",
    "callbacks.ais": "AIS",
    "callbacks.aqn": "AQNNoise",
    "callbacks.base": "RLCallback",
    "callbacks.checkpoint": "RunCheckpoint",
    "callbacks.geometric": "GeometricRejection",
    "callbacks.guard": "Guard",
    "callbacks.masked": "MaskedIS",
    "callbacks.mismatch": "MismatchMonitor",
    "callbacks.opsm": "OffPolicySequenceMask",
    "callbacks.predictions": "Predictions",
    "callbacks.progress": "RLProgress",
    "callbacks.publisher": "WeightPublisher",
    "callbacks.report": "Report",
    "callbacks.truncated": "TruncatedIS",
    "callbacks.veto": "TokenVeto",
    "data.task": "Task",
    "data.tasks": "Countdown DatasetTask Sudoku",
    "data.tasks.countdown": "Countdown",
    "data.tasks.dataset": "DatasetTask",
    "data.tasks.sudoku": "Sudoku",
    "loggers": "RunCSVLogger",
    "objective": "CISPO DAPO DrGRPO DualClipGRPO GRPO GSPO Objective PositiveGRPO SAPO TBPO",
    "optim": "MuonAdamW",
    "policy": "CausalPolicy",
    "precision": "NVFP4LoRA QATAligned QuantizedPrecision UnifiedFP8",
    "precision.base": "QuantizedPrecision",
    "precision.formats": f"{FORMATS} Dense NumberFormat",
    "precision.formats.base": "NumberFormat",
    "precision.formats.dense": "BF16 Dense FP16 FP32",
    "precision.formats.fp8_block": "FP8Block",
    "precision.formats.fp8_row": "FP8Row",
    "precision.formats.fp8_tensor": "FP8Tensor",
    "precision.formats.int4_group": "Int4Group",
    "precision.formats.int8_channel": "Int8Channel",
    "precision.formats.mxfp4": "MXFP4",
    "precision.formats.nf4": "NF4",
    "precision.formats.nvfp4": "NVFP4",
    "precision.lora4bit": "NVFP4LoRA",
    "precision.qat": "QATAligned",
    "precision.unified_fp8": "UnifiedFP8",
    "rewards": "ConstantReward CountdownReward FormatReward MathReward Reward SudokuReward",
    "rewards.base": "Reward",
    "rewards.constant": "ConstantReward",
    "rewards.countdown": "CountdownReward",
    "rewards.format": "FormatReward",
    "rewards.math": "MathReward",
    "rewards.sudoku": "SudokuReward",
    "rollout": "RolloutEngine TransformersEngine VLLMEngine",
    "rollout.engine": "RolloutEngine",
    "rollout.transformers": "TransformersEngine",
    "rollout.vllm": "VLLMEngine",
    "strategies": "ColocatedStrategy",
    "strategies.colocated": "ColocatedStrategy",
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
    if new.endswith("_triton") and find_spec("triton") is None:
        with pytest.raises(ModuleNotFoundError, match="triton"):
            import_module(f"lit_qrl.{old}")
        return
    assert import_module(f"lit_qrl.{old}") is import_module(new)


@pytest.mark.parametrize("package", OLD)
def test_every_module_is_found(package):
    for name in OLD[package].split():
        path = ".".join(filter(None, ("lit_qrl", package, name)))
        assert find_spec(path), f"{path} needs a row in lit_qrl/aliases.py"
        assert find_spec(current(path)), f"the row of {path} names what is not there"


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
    import lit_qrl.metrics

    assert reload(lit_qrl.metrics).__name__ == "lit_qrl.loop.evaluation"


@pytest.mark.usefixtures("unseen")
def test_what_lies_in_a_package_moves_with_it(caplog):
    found = import_module("lit_qrl.precision.formats.support")
    assert found is import_module("lit_qrl.formats.support")
    assert current("lit_qrl.precision.formats.gemm.gemm") == "lit_qrl.formats.kernels.gemm.gemm"
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
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code in (0, None)
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
