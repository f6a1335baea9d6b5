import functools
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum
from inspect import signature
from pathlib import Path

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import LearningRateMonitor

import lit_qrl
from lit_qrl.callbacks import AIS, MaskedIS
from lit_qrl.objective import DAPO, GRPO, Objective
from lit_qrl.optim import MuonAdamW
from lit_qrl.run.description import Described, describe


class Mode(Enum):
    FAST = "fast"


class Base(Described):
    def __init__(self, size: int = 3) -> None:
        self.double = 2 * size


class Derived(Base):
    def __init__(self, name: str, *, parts: tuple = (), **kwargs) -> None:
        """Keeps its text."""
        super().__init__(**kwargs)


class Silent(Derived):
    pass


@dataclass
class Settings:
    rank: int = 8
    layers: set = field(default_factory=set)
    derived: int = field(default=0, init=False)


def test_the_outermost_constructor_is_remembered_with_its_defaults():
    made = Silent("x", parts=(Base(), Path("a/b"), Mode.FAST), size=5)
    assert describe(made) == {
        "class_path": f"{__name__}.Silent",
        "init_args": {
            "name": "x",
            "parts": [{"class_path": f"{__name__}.Base", "init_args": {"size": 3}}, "a/b", "fast"],
            "size": 5,
        },
    }
    assert made.double == 10


def test_a_constructor_keeps_its_signature_and_its_text():
    assert list(signature(Derived).parameters) == ["name", "parts", "kwargs"]
    assert Derived.__init__.__doc__ == "Keeps its text."
    assert describe(pickle.loads(pickle.dumps(Base(7))))["init_args"] == {"size": 7}


def test_foreign_objects_give_what_can_be_read():
    assert describe(Settings(rank=4, layers={"v", "q"}))["init_args"] == {"rank": 4, "layers": ["q", "v"]}
    found = describe(LearningRateMonitor(logging_interval="step"))
    assert found["class_path"].endswith("LearningRateMonitor")
    assert found["init_args"] == {"logging_interval": "step"}


def test_functions_and_what_has_no_name():
    assert describe(functools.partial(torch.optim.SGD, lr=0.5))["init_args"] == {"lr": 0.5}
    assert describe(torch.optim.SGD) == {"class_path": "torch.optim.sgd.SGD"}
    assert describe(signature) == "inspect.signature"
    assert describe(lambda: 0).startswith("<lambda of test_description.py, line ")


@pytest.mark.parametrize("made", [GRPO(scale="none", kl_coefficient=0.1), DAPO(), AIS(clip=3.0), MaskedIS("sequence")])
def test_a_parser_makes_an_equal_object_again(made):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--one", type=Objective if isinstance(made, Objective) else type(made))
    again = parser.instantiate(parser.parse_object({"one": describe(made)})).one
    state, other = ({k: v for k, v in vars(one).items() if k != "_made_with"} for one in (made, again))
    assert type(again) is type(made)
    assert state == other


def test_an_optimizer_is_saved_without_what_it_was_made_with():
    named = list(torch.nn.Linear(4, 4).named_parameters())
    optimizer = MuonAdamW(named, momentum=0.8)
    assert describe(optimizer)["init_args"]["momentum"] == 0.8
    assert set(optimizer.state_dict()) == {"state", "param_groups"}


def test_a_script_whose_functions_are_recorded_is_not_run_again(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "from lit_qrl.run.description import describe\n"
        "def score(completions): ...\n"
        "print('ran', describe(score))\n"
        "import importlib\n"
        "print(importlib.import_module('mine').score is score)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(lit_qrl.__file__).parents[1])}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split("\n")[:2] == ["ran mine.score", "True"]
