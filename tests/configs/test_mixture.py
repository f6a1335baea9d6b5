"""The quickstart and the recipes for mixtures of experts."""

import csv
from pathlib import Path

import pytest
import yaml

from lit_qrl.cli.main import main

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "configs" / "recipes"


def test_the_quickstart_replays_what_the_sampler_took(tmp_path, monkeypatch, quick_plots):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # restored when the run has set it
    small = {
        "model.policy.model": ROOT / "models" / "tiny-moe-countdown",
        "data.prompts_per_iteration": 8,
        "data.group_size": 4,
        "trainer.max_epochs": 1,
        "trainer.limit_val_batches": 0,
        "trainer.enable_progress_bar": "false",
        "trainer.callbacks.compare_every": 1,
        "trainer.default_root_dir": tmp_path / "run",
    }
    options = (f"--{key}={value}" for key, value in small.items())
    main(["fit", f"--config={ROOT / 'configs' / 'quickstart_moe.yaml'}", *options])
    with (tmp_path / "run" / "metrics.csv").open() as file:
        row = next(row for row in csv.DictReader(file) if row.get("routing/megabytes"))
    assert 0 < float(row["routing/replayed_kl_k3"]) < float(row["routing/free_kl_k3"]) < 0.1
    # With one update TruncatedIS and the metrics take the training forward's log-probs: the same, replayed.
    assert float(row["mismatch/kl_k3"]) == pytest.approx(float(row["routing/replayed_kl_k3"]), rel=0.05)
    assert 0 < float(row["routing/differing_tokens"]) < 0.5
    assert float(row["routing/unused_experts"]) == 0


@pytest.mark.parametrize("format", ["fp8", "w4a16"])
@pytest.mark.parametrize("objective", ["GSPO", "TBPO"])
def test_recipes_differ_from_the_dense_ones_in_what_they_name(format, objective):
    recipe, dense = (
        yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
        for name in (f"qarl_moe_30b_{format}_{objective.lower()}", f"qarl_{format}_tbpo")
    )
    assert recipe["model"]["policy"]["init_args"].pop("model") == "Qwen/Qwen3-30B-A3B-Base"
    assert dense["model"]["policy"]["init_args"].pop("model") == "Qwen/Qwen3-8B-Base"
    assert recipe["trainer"].pop("callbacks") == [{"class_path": "RouterReplay"}]
    assert dense["trainer"].pop("callbacks") == []
    surrogate, other = recipe["model"].pop("objective"), dense["model"].pop("objective")
    assert surrogate["class_path"] == objective
    if objective == "GSPO":
        bounds = {"clip_low": 3e-4, "clip_high": 4e-4}  # Table 2
        assert (
            surrogate["init_args"] == {"scale": "group", "reduction": "sequence", "old_logprobs": "decoupled"} | bounds
        )
    else:
        assert surrogate == other
    assert recipe == dense
