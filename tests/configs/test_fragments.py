"""The fragments of corrections and objectives, on a parser that holds nothing else."""

from itertools import permutations
from pathlib import Path

from jsonargparse import ArgumentParser
from lightning.pytorch import Callback

from lit_qrl import callbacks, objective
from lit_qrl.objective import DAPO, DrGRPO, Objective

CONFIGS = Path(__file__).parents[2] / "configs"
OBJECTIVES = sorted((CONFIGS / "objective").glob("*.yaml"))
CORRECTIONS = sorted((CONFIGS / "correction").glob("*.yaml"))
# Imported so that short class names resolve.
assert callbacks.AIS
assert objective.GRPO


def parser():
    made = ArgumentParser(exit_on_error=False)
    made.add_argument("--config", action="config")
    made.add_argument("--model.objective", type=Objective)
    made.add_argument("--trainer.callbacks", type=list[Callback] | None)
    return made


def built(*paths):
    made = parser()
    return made.instantiate(made.parse_args([f"--config={path}" for path in paths]))


def attributes(objective):
    return {name: value for name, value in vars(objective).items() if name != "_made_with"}


def settings(*paths):
    chosen = built(*paths).model.objective
    return type(chosen), attributes(chosen)


def test_every_fragment_says_what_it_is():
    assert len(OBJECTIVES) >= 9
    assert len(CORRECTIONS) >= 7
    for path in [*OBJECTIVES, *CORRECTIONS]:
        assert path.read_text().startswith("# "), path


def test_the_last_objective_wins_and_inherits_nothing():
    alone = {path: settings(path) for path in OBJECTIVES}
    for first, second in permutations(OBJECTIVES, 2):
        kind, values = settings(first, second)
        expected_kind, expected = alone[second]
        assert kind is expected_kind
        shared = {"scale", "baseline", "reduction", "old_logprobs", "clip_low", "clip_high"} & expected.keys()
        wrong = {name: values[name] for name in shared if values[name] != expected[name]}
        # A policy gradient has no clip: its ratio is 1.
        assert not wrong or expected["old_logprobs"] == "policy_gradient", (first.name, second.name, wrong)


def test_fragments_restate_the_defaults_of_their_class():
    kind, values = settings(CONFIGS / "objective" / "dapo.yaml")
    assert (kind, values) == (DAPO, attributes(DAPO()))
    kind, values = settings(CONFIGS / "objective" / "dr_grpo.yaml")
    assert (kind, values) == (DrGRPO, attributes(DrGRPO()))
