"""Messages as the installed jsonargparse and Lightning word them, and the paragraph that a user reads."""

import pickle

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.accelerators.mps import MPSAccelerator

from lit_qrl.cli.errors import (
    ENGINE_REMEDY,
    PROBE_REMEDY,
    SEE_HELP,
    SHOWN,
    made_by_training,
    paragraph,
    readable,
    refused,
)
from lit_qrl.cli.training import REFUSALS
from lit_qrl.errors import ConfigError, IncompleteError
from lit_qrl.formats.numerics import NONFINITE_REMEDY
from lit_qrl.receipts.ledger import Fault, PublishError, RefusedError

WEIGHT = "model.layers.0.mlp.up_proj.weight"


def classes(key):
    return {"trainer.callbacks": ["AIS", "TokenVeto"], "data.engine": ["TransformersEngine", "VLLMEngine"]}.get(key, [])


CASES = {
    "unknown class in a mapping": (
        'Parser key "data.engine":\n  - Expected a dot import path string: {class_path: Transformer, init_args: {}}',
        "data.engine: there is no class 'Transformer'. Did you mean 'TransformersEngine'?",
    ),
    "key of a file": (
        "Subcommand 'fit' does not accept option 'data.group_siz'",
        "there is no option 'data.group_siz'. Did you mean 'data.group_size'?",
    ),
    "choice beside a number": (
        'Parser key "data.micro_batches":\n  Does not validate against any of the Union subtypes\n'
        "  Subtypes: [<class 'int'>, typing.Literal['auto']]\n"
        "  Errors:\n    - Expected a <class 'int'>\n    - Expected a typing.Literal['auto']\n"
        "  Given value: 4.5",
        "data.micro_batches: the value is not one of the choices. Expected: int, auto. Given: 4.5.",
    ),
    "class of a kind without names of its own": (
        'Parser key "trainer.profiler":\n  - Expected a dot import path string: Slow',
        "trainer.profiler: there is no class 'Slow'. Give it with its module, such as package.module.Class.",
    ),
    "option of an abstract class": (
        'Parser key "trainer.logger":\n  - Expected an instantiatable class, but a.Logger is abstract\n'
        "  Given value: NestedArg(key='save_dir', val='x')",
        "trainer.logger: there is no option 'save_dir'. If no class is chosen yet, set trainer.logger.class_path "
        "first; else see --help for its options.",
    ),
    "several types": (
        "Parser key \"a.b\":\n  - Expected a <class 'int'>. Got value: x\n  - Expected a <class 'NoneType'>",
        "a.b: the value has the wrong type. Expected: int or null. Given: x.",
    ),
    "library that has an extra": (
        "Parser key \"model.optimizer\":\n  No module named 'bitsandbytes.optim'",
        "model.optimizer: No module named 'bitsandbytes.optim'. Install it: pip install 'lit-qrl[bnb]'.",
    ),
    "file": ("File does not exist: 'nope.yaml'", "the file 'nope.yaml' does not exist. Check the path."),
    "required": (
        'Key "data.task" is required but its value is None',
        "data.task is required but was not given. Add it to a --config file or the command line.",
    ),
    "required of a command": (
        "the following arguments are required: fit.model.policy, fit.data.task",
        "model.policy, data.task: required, but not given. Add it to a --config file, in a class to its init_args.",
    ),
    "paragraph of a class's own parser": (
        'Parser key "trainer.callbacks":\n  power: the value has the wrong type. Expected: float.',
        "trainer.callbacks.power: the value has the wrong type. Expected: float.",
    ),
    "number that a class may stand for": (
        "Parser key \"lr\":\n  - Subtypes: [<class 'float'>, <class 'torch.Tensor'>]\n  Errors:\n"
        "    - Expected a <class 'float'>\n    - Expected a dot import path string: abc\n  Given value: abc",
        "lr: the value has the wrong type. Expected: float. Given: abc.",
    ),
    "file without --config": (
        "unrecognized arguments: configs/a.yaml",
        "A configuration file comes after --config. Given: configs/a.yaml. Write --config configs/a.yaml.",
    ),
    "anything else": ('Parser key "x":\n  - Something odd happened', "x: Something odd happened."),
}


@pytest.mark.parametrize("case", CASES)
def test_a_message_becomes_one_sentence(case):
    message, expected = CASES[case]
    assert readable(message, classes, ["--data.group_size", "--data.passes"]) == expected


def test_a_long_list_of_options_is_not_written_out():
    message = "unrecognized arguments: --quiet"
    many = [f"--option_{number}" for number in range(40)]
    assert readable(message, classes, many) == f"--quiet is not an option of this command. {SEE_HELP}"
    assert readable(message, classes, many[:2]).endswith("Choose one of --option_0, --option_1.")


SETTINGS = {
    "strategy": ({"strategy": "dddp"}, ["trainer.strategy: dddp", "Correct trainer.strategy."]),
    "strategy of ours by its name": (
        {"strategy": "ShardedStrategy"},
        ["trainer.strategy: ShardedStrategy", "ShardedStrategy is a class: set trainer.strategy.class_path to it"],
    ),
    "devices": ({"devices": 0, "accelerator": "cpu"}, ["trainer.devices: 0", "Correct trainer."]),
    "devices by number": ({"devices": [0, 1], "accelerator": "cpu"}, ["trainer.devices: [0, 1]", "Correct trainer."]),
    "epochs": ({"max_epochs": -3}, ["trainer.max_epochs: -3", "Correct trainer.max_epochs."]),
    "library that is missing": ({"accelerator": "tpu"}, ["torch_xla", "trainer.accelerator: tpu"]),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_what_lightning_refuses_names_key_value_and_remedy(case, monkeypatch):
    for accelerator in (CUDAAccelerator, MPSAccelerator):
        monkeypatch.setattr(accelerator, "is_available", staticmethod(lambda: False))
    settings, words = SETTINGS[case]
    with pytest.raises(REFUSALS) as caught:
        Trainer(logger=False, enable_checkpointing=False, **settings)
    text = str(refused(caught.value, {"devices": "auto", **settings}))
    assert text.startswith("Lightning cannot build the Trainer: ")
    assert "\n" not in text
    for word in words:
        assert word in text, text


def test_an_error_that_names_no_setting_shows_the_hardware():
    error = refused(ValueError("Odd.\nVery odd."), {"accelerator": "cpu", "devices": "auto", "max_epochs": 3})
    assert isinstance(error, ConfigError)
    assert str(error).startswith("Lightning cannot build the Trainer: Odd. Very odd. Given: trainer.accelerator: cpu. ")
    assert str(refused(ValueError("Odd"), {})).endswith("Trainer: Odd. See lit-qrl fit --help.")


@pytest.mark.parametrize(
    ("kinds", "remedy"),
    [
        (["stale"], ENGINE_REMEDY),
        (["missing", "non_finite"], ENGINE_REMEDY),
        (["non_finite", "non_finite"], NONFINITE_REMEDY),
        (["probe"], PROBE_REMEDY),
    ],
)
def test_faults_are_named_with_the_remedy_of_their_kind(kinds, remedy, tmp_path):
    error = PublishError([Fault(kind, f"layer{i}") for i, kind in enumerate(kinds)], 3)
    text = paragraph(error, tmp_path)
    assert text.startswith("The run was stopped: publish 3 did not arrive as sent. ")
    for fault in error.faults:
        assert str(fault) in text
    assert [each in text for each in (ENGINE_REMEDY, NONFINITE_REMEDY, PROBE_REMEDY)].count(True) == 1
    assert remedy in text
    assert "\n" not in text


def test_a_long_list_is_cut_and_counted(tmp_path):
    error = PublishError([Fault("stale", f"layer{i}.") for i in range(SHOWN + 9)], 0)
    text = paragraph(error, tmp_path)
    assert f"layer{SHOWN - 1}." in text
    assert f"layer{SHOWN}." not in text
    assert "(and 9 more)" in text


def test_where_the_run_is_and_what_it_left(tmp_path):
    error = PublishError([Fault("stale", WEIGHT)], -1)
    text = paragraph(error, tmp_path)
    assert "the publish before the first iteration did not arrive" in text
    assert text.endswith(f"The run folder is {tmp_path}. No checkpoint had been written.")
    for part in ("report/index.html", "checkpoints/last.ckpt"):
        (tmp_path / part).parent.mkdir()
        (tmp_path / part).touch()
    text = paragraph(error, tmp_path)
    assert f"The report is {tmp_path / 'report' / 'index.html'}." in text
    saved = f"The last checkpoint is {tmp_path / 'checkpoints' / 'last.ckpt'}"
    assert text.endswith(f"{saved}.")
    for broken in (PublishError([Fault("non_finite", WEIGHT)], 2), ConfigError("NaN.", remedy=NONFINITE_REMEDY)):
        assert paragraph(broken, tmp_path).endswith(f"{saved}, and may hold these weights already.")


@pytest.mark.parametrize(
    ("remedy", "steps", "made"), [(NONFINITE_REMEDY, 0, False), (NONFINITE_REMEDY, 1, True), ("Correct it.", 1, False)]
)
def test_a_checkpoint_with_nan_is_bad_input_and_nan_of_a_step_is_not(remedy, steps, made):
    assert made_by_training(ConfigError("A weight holds NaN.", remedy=remedy), steps) is made


def test_a_refusal_keeps_its_own_words(tmp_path):
    error = RefusedError(f"{WEIGHT} was published twice in one stream. Send every tensor once.", 2)
    text = paragraph(error, tmp_path)
    assert f"refused. {error} " in text
    assert "on_publish" in text
    assert isinstance(error, ValueError)
    incomplete = IncompleteError("The stream of weights is incomplete.")
    assert "by a publish that was refused. The stream of weights is incomplete. What is sent" in paragraph(
        incomplete, tmp_path
    )
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), str(copied), copied.version, copied.faults) == (RefusedError, str(error), 2, [])
