"""Launches that are remembered: which are alike, and what the driver gets."""

from types import SimpleNamespace

import pytest
import torch

from lit_qrl.functional import _launch
from lit_qrl.functional._launch import Remembered, remembered


class Kernel:
    """What Triton makes of `kernel(x, count, offset, SIZE: tl.constexpr)`; `offset` is not specialized."""

    def __init__(self):
        self.params = [SimpleNamespace(is_constexpr=n == 3, do_not_specialize=n == 2) for n in range(4)]
        self.device_caches, self.asked, self.ran = {}, [], []

    def __getitem__(self, grid):
        def start(*arguments, **options):
            self.asked.append((grid, arguments, options))
            number = len(self.asked)
            return SimpleNamespace(
                run=lambda *given: self.ran.append((number, given)), function="function", packed_metadata="metadata"
            )

        return start


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(_launch, "find_spec", lambda name: True)  # Triton is installed
    _launch.triton_installed.cache_clear()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", raising=False)
    yield Kernel()
    _launch.triton_installed.cache_clear()


X = torch.zeros(16)  # torch aligns what it allocates
ALIKE = (X, 48, 5, 128), (X.clone()[:8], 32, 7, 128)
OTHERS = {
    "dtype": (X.to(torch.bfloat16), 48, 5, 128),
    "a pointer that is not aligned": (X[1:], 48, 5, 128),
    "a number that 16 does not divide": (X, 47, 5, 128),
    "one": (X, 1, 5, 128),
    "a wide number": (X, 48, 2**31, 128),
    "a fraction": (X, 48.0, 5, 128),
    "a constant": (X, 48, 5, 64),
}


def test_a_launch_alike_goes_to_the_driver(kernel):
    start = remembered(kernel)
    start[3, 2](*ALIKE[0], num_warps=4)
    start[5,](*ALIKE[1], num_warps=4)
    assert len(kernel.asked) == 1
    arguments = ALIKE[1][0].data_ptr(), 32, 7, 128
    assert kernel.ran == [(1, (5, 1, 1, "stream", "function", "metadata", None, None, None, *arguments))]


@pytest.mark.parametrize("what", OTHERS)
def test_another_kind_is_asked_for(kernel, what):
    start = Remembered(kernel)
    for arguments in (ALIKE[0], OTHERS[what], OTHERS[what]):
        start[3,](*arguments, num_warps=4)
    assert len(kernel.asked) == 2
    assert [number for number, _ in kernel.ran] == [2]


def test_another_option_is_asked_for(kernel):
    start = Remembered(kernel)
    for warps in (4, 8):
        start[3,](*ALIKE[0], num_warps=warps)
    assert len(kernel.asked) == 2


def test_an_interpreted_kernel_stays_itself():
    plain = SimpleNamespace()
    assert remembered(plain) is plain
