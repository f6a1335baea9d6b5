"""The fragments of formats and precision plugins: each builds, and the last of two wins."""

from itertools import permutations
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.plugins import Precision

from lit_qrl import formats, precision
from lit_qrl.formats import NumberFormat
from lit_qrl.policy import CausalPolicy

FRAGMENTS = sorted((Path(__file__).parents[2] / "configs" / "precision").glob("*.yaml"))
# Imported so that short class names resolve.
assert precision.QATAligned


def parsed(*paths):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_argument("--trainer.plugins", type=list[Precision] | None)
    parser.add_argument("--trainer.precision", type=str | None)
    parser.add_argument("--publisher.format", type=NumberFormat | str, default="auto")
    parser.add_subclass_arguments(CausalPolicy, "model.policy")
    parser.add_argument("--model.optimizer", type=OptimizerCallable)
    base = ["--model.policy=CausalPolicy", "--model.policy.model=some/model", "--model.optimizer=torch.optim.AdamW"]
    return parser, parser.parse_args(base + [f"--config={path}" for path in paths])


def effective(*paths):
    config = parsed(*paths)[1]
    plugins = [plugin.class_path.rpartition(".")[2] for plugin in config.trainer.plugins or []]
    return plugins, config.trainer.precision


@pytest.mark.parametrize("path", FRAGMENTS, ids=lambda path: path.stem)
def test_every_fragment_says_what_it_is_and_builds(path):
    assert path.read_text().startswith("# ")
    parser, config = parsed(path)
    lora = config.model.policy.init_args.lora
    config.model = None  # the policy would look for its folder
    built = parser.instantiate(config)
    format = built.publisher.format
    assert format == "auto" or formats.get(format).name in formats.names()
    for plugin in built.trainer.plugins or []:
        assert isinstance(plugin, precision.QuantizedPrecision)
        assert format == "auto"
        assert (lora is not None) == isinstance(plugin, precision.PackedLoRA)
        name = path.stem.removeprefix("qat_").removesuffix("_lora").replace("unified_fp8", "fp8_block")
        assert plugin.format.name == ("int4_group" if name.startswith("w4a8") else name)
        assert getattr(plugin.format, "activations", None) in {"w4a8_fp8": ["fp8"], "w4a8_int8": ["int8"]}.get(
            name, [None, "token"]
        )
    if path.stem.startswith("rollout_") and "w4a8" not in path.stem:
        assert format == path.stem.removeprefix("rollout_")


def test_the_last_of_two_wins():
    kinds = ("bf16", "fp16_mixed", "rollout_int4_group", "rollout_w4a8_fp8", "qat_fp8_row", "unified_fp8", "nvfp4_lora")
    chosen = [path for path in FRAGMENTS if path.stem in kinds]
    assert len(chosen) == len(kinds)
    for first, second in permutations(chosen, 2):
        plugins, dtype = effective(first, second)
        assert not (plugins and dtype), (first.name, second.name)
        wanted = yaml.safe_load(second.read_text())["trainer"]
        assert plugins == [plugin["class_path"] for plugin in wanted["plugins"] or []]
        if "precision" in wanted:
            assert dtype == wanted["precision"]


def test_there_is_a_fragment_for_every_format():
    stems = {path.stem for path in FRAGMENTS}
    for name in formats.names():
        assert {f"rollout_{name}", f"qat_{name}", f"{name}_lora", name, "unified_fp8", "bf16", "fp16_true"} & stems
        if name not in ("fp32", "nf4"):  # the learner's usual dtype; no engine but the embedded one takes the other
            assert f"rollout_{name}" in stems
