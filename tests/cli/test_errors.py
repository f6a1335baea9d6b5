"""What is made of messages of others; those of the installed jsonargparse and Lightning: tests/test_bad_input.py."""

import pickle

import pytest

from lit_qrl.cli.errors import ENGINE_REMEDY, PROBE_REMEDY, SHOWN, made_by_training, paragraph, readable, refused
from lit_qrl.errors import ConfigError
from lit_qrl.formats.numerics import NONFINITE_REMEDY
from lit_qrl.receipts.ledger import Fault, PublishError, RefusedError

WEIGHT = "model.layers.0.mlp.up_proj.weight"


CASES = {
    'Parser key "trainer.profiler":\n  - Expected a dot import path string: Slow': (
        "trainer.profiler: there is no class 'Slow'. Give it with its module, such as package.module.Class."
    ),
    "Parser key \"model.optimizer\":\n  No module named 'bitsandbytes.optim'": (
        "model.optimizer: No module named 'bitsandbytes.optim'. Install it: pip install 'lit-qrl[bnb]'."
    ),
    "File does not exist: 'nope.yaml'": "the file 'nope.yaml' does not exist. Check the path.",
    'Key "data.task" is required but its value is None': (
        "data.task is required but was not given. Add it to a --config file or the command line."
    ),
    "the following arguments are required: fit.model.policy, fit.data.task": (
        "model.policy, data.task: required, but not given. Add it to a --config file, in a class to its init_args."
    ),
    'Parser key "x":\n  - Something odd happened': "x: Something odd happened.",
}


@pytest.mark.parametrize("message", CASES)
def test_a_message_becomes_one_sentence(message):
    assert readable(message) == CASES[message]


def test_a_short_list_of_options_is_written_out():
    options = ["--option_0", "--option_1"]
    assert readable("unrecognized arguments: --quiet", options=options).endswith("one of --option_0, --option_1.")


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


def test_a_refusal_comes_whole_from_another_process():
    error = RefusedError(f"{WEIGHT} was published twice in one stream. Send every tensor once.", 2)
    assert isinstance(error, ValueError)
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), str(copied), copied.version, copied.faults) == (RefusedError, str(error), 2, [])
