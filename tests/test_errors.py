import pickle

import pytest
import torch

from lit_qrl.errors import ConfigError, MemoryShortageError, nearest, require_object, within_memory


def test_config_error_reads_as_one_paragraph_and_survives_pickling():
    error = ConfigError("A key is wrong.", expected="1", given=2, remedy="Fix it.")
    assert str(error) == "A key is wrong. Expected: 1. Given: 2. Fix it."
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.remedy, type(copy)) == (str(error), "Fix it.", ConfigError)


def test_nearest_lists_the_choices_when_nothing_is_close():
    assert nearest("fp8_rwo", ["fp8_row", "bf16"]) == "Did you mean 'fp8_row'?"
    assert nearest("zzz", ["fp8_row", "bf16"]) == "Choose one of fp8_row, bf16."
    assert nearest("", ["fp8_row"]) == "Choose one of fp8_row."


def test_nearest_knows_other_cases_initials_and_beginnings():
    names = ["AIS", "TruncatedIS", "MaskedIS", "VLLMEngine", "int4_group", "int8_channel"]
    for given, meant in {"TIS": "TruncatedIS", "ais": "AIS", "vllm": "VLLMEngine", "int4": "int4_group"}.items():
        assert nearest(given, names) == f"Did you mean {meant!r}?"
    assert nearest("int", names).startswith("Choose one of AIS, ")
    assert nearest("r", ["revision", "dtype"]) == "Choose one of revision, dtype."


def test_memory_that_runs_out_is_one_paragraph_of_the_innermost_work():
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.81 GiB of which 3.50 MiB "
        "is free. Process 7 has 139.8 GiB memory in use."
    )
    with pytest.raises(MemoryShortageError) as caught, within_memory("publishing", "No."):
        with within_memory("quantizing x", "Take less."):
            raise error
    text = (
        "Memory ran out while quantizing x: 20.00 MiB were asked for and 3.50 MiB of 139.81 GiB were free. Take less."
    )
    assert str(caught.value) == text
    with pytest.raises(RuntimeError, match=r"^shapes$") as other, within_memory("publishing", "No."):
        raise RuntimeError("shapes")
    assert type(other.value) is RuntimeError


def test_the_host_s_allocator_is_understood():
    with pytest.raises(MemoryShortageError, match=r"asked for\. Take less\.$"), within_memory("reading", "Take less."):
        torch.empty(2**50)


def test_only_what_is_known_to_be_no_object_is_refused():
    require_object("data.engine", object(), "TransformersEngine()")
    for given, told in (("vllm", "'vllm'"), (int, "class int"), (None, "None"), ({"a": 1}, "{'a': 1}")):
        with pytest.raises(ConfigError, match=f"data.engine is no object. .*Given: {told}"):
            require_object("data.engine", given, "TransformersEngine()")
