"""Patches of a module that stands in for vLLM's."""

import pytest

from lit_qrl.errors import ConfigError
from lit_qrl.rollout.vllm.patches.patch import Patch, Versions, find


@pytest.mark.parametrize(
    ("versions", "inside", "outside"),
    [
        (Versions("0.26"), [(0, 26, 0), (0, 32, 1), (1, 0, 0)], [(0, 25, 9), (0, 0, 0)]),
        (Versions("0.26", "0.32"), [(0, 26, 0), (0, 31, 9)], [(0, 32, 0), (0, 33, 0)]),
        (Versions("0.26.1", "0.27.2"), [(0, 26, 1), (0, 27, 1)], [(0, 26, 0), (0, 27, 2)]),
    ],
)
def test_versions(versions, inside, outside):
    assert all(version in versions for version in inside)
    assert not any(version in versions for version in outside)


class Engine:
    kind = "engine"

    def __init__(self):
        self.pool = None

    def step(self):
        self.finished = self.kind


def test_what_an_init_or_a_function_sets_is_there(fake):
    fake("vllm.part", Engine=Engine, number=3)
    for symbol in ("number", "Engine.kind", "Engine.pool", "Engine.step.finished", "Engine.gone|step"):
        find(f"vllm.part:{symbol}")
    for symbol in ("other", "Engine.other", "Engine.finished", "Engine.step.other", "Engine.gone|lost"):
        with pytest.raises(AttributeError, match="has no"):
            find(f"vllm.part:{symbol}")


def patch(symbol, **options):
    changes = {f"vllm.part:{symbol}": lambda original: lambda: original() + 1}
    return Patch("a.package.one_more", Versions("0.26"), "never", changes, **options)


def test_a_change_is_made_once_however_often_it_is_applied(fake):
    module, also = fake("vllm.part", count=lambda: 1), []
    for _ in range(3):
        patch("count", also=lambda: also.append(1)).apply((0, 32, 0))
    assert module.count() == 2
    assert len(also) == 3


@pytest.mark.parametrize(
    ("symbol", "needs", "named"),
    [
        ("renamed", (), r"vllm\.part has no renamed.*vllm\.part\.renamed"),
        ("count", ("vllm.part:Engine.lost",), r"Engine has no lost.*vllm\.part\.Engine\.lost"),
        ("count", ("vllm_of_another_layout.part:x",), "No module named 'vllm_of_another_layout'"),
    ],
)
def test_what_is_gone_is_an_error_that_names_patch_symbol_and_version_and_nothing_is_changed(
    symbol, needs, named, fake
):
    module = fake("vllm.part", count=lambda: 1, Engine=Engine)
    with pytest.raises(ConfigError, match=rf"patch one_more of vLLM does not fit.*{named}.*Given: vLLM 0\.33\.1"):
        patch(symbol, needs=needs).apply((0, 33, 1))
    assert module.count() == 1


def test_a_patch_may_be_for_one_device():
    assert patch("count", device="cuda").concerns((0, 26, 0), "cuda")
    assert not patch("count", device="cuda").concerns((0, 26, 0), "cpu")
    assert not patch("count").concerns((0, 25, 0), "cpu")
