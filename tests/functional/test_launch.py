import re
from pathlib import Path

import pytest

import lit_qrl
from lit_qrl.errors import ConfigError
from lit_qrl.functional._launch import KERNELS, triton_installed

ASKED = re.compile(r"(?:triton_installed|available|available_for_e4m3|_in_one_pass)\((?:[a-z_\[\]0-9]+, )?\"(\w+)\"")


@pytest.fixture(autouse=True)
def fresh():
    triton_installed.cache_clear()
    yield
    triton_installed.cache_clear()


def test_the_names_that_can_be_switched_off_are_those_that_the_code_asks_for():
    sources = Path(lit_qrl.__file__).parent.rglob("*.py")
    assert {name for file in sources for name in ASKED.findall(file.read_text())} == set(KERNELS)


def test_a_kernel_is_switched_off_by_name_and_another_name_is_refused(monkeypatch):
    monkeypatch.setenv("LIT_QRL_WITHOUT", "norm,gated")
    assert not triton_installed("norm")
    monkeypatch.setenv("LIT_QRL_WITHOUT", "normm")
    with pytest.raises(ConfigError, match="normm"):
        triton_installed("rotary")
