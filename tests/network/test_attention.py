import pytest
from transformers import Gemma3TextConfig

from lit_qrl.errors import ConfigError
from lit_qrl.network.attention import implementation
from tests.families.configs import BY_TYPE


def test_a_softcap_takes_an_attention_that_has_it():
    config = BY_TYPE["gemma2"].config()
    assert implementation(config) == "eager"
    assert implementation(config, "flash_attention_2") == "flash_attention_2"
    with pytest.raises(ConfigError, match="soft-cap"):
        implementation(config, "sdpa")


def test_other_models_leave_the_choice_to_the_library():
    assert implementation(Gemma3TextConfig()) is None  # the option is there, and null
    assert implementation(Gemma3TextConfig(), "sdpa") == "sdpa"
