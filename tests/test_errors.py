import pickle

from lit_qrl.errors import ConfigError, nearest


def test_config_error_reads_as_one_paragraph_and_survives_pickling():
    error = ConfigError("A key is wrong.", expected="1", given=2, remedy="Fix it.")
    assert str(error) == "A key is wrong. Expected: 1. Given: 2. Fix it."
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.remedy, type(copy)) == (str(error), "Fix it.", ConfigError)


def test_nearest_lists_the_choices_when_nothing_is_close():
    assert nearest("fp8_rwo", ["fp8_row", "bf16"]) == "Did you mean 'fp8_row'?"
    assert nearest("zzz", ["fp8_row", "bf16"]) == "Choose one of fp8_row, bf16."
