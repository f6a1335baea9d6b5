import pickle

import pytest

from lit_qrl.cli.publish_errors import ENGINE_REMEDY, NONFINITE_REMEDY, PROBE_REMEDY, SHOWN, made_by_training, paragraph
from lit_qrl.errors import ConfigError, IncompleteError
from lit_qrl.receipts.ledger import Fault, PublishError, RefusedError

WEIGHT = "model.layers.0.mlp.up_proj.weight"


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
