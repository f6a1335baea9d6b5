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


@pytest.mark.gpu
def test_no_number_of_tokens_is_compiled_for():
    from lit_qrl.formats.kernels import norm_triton, tiles_triton, turned_triton

    kernels = norm_triton._norm_kernel, norm_triton._norm_backward_kernel
    kernels += tiles_triton._tiles_kernel, turned_triton._turned_back_kernel

    def run(tokens, copies):
        x, weight = torch.randn(tokens, 256, device="cuda").bfloat16(), torch.ones(256, device="cuda").bfloat16()
        _, _, rstd, _ = norm_triton.norm(x, weight, 1e-6)
        norm_triton.norm_backward(x, x, rstd, weight)
        tiles_triton.tiles(x, False, False, tiles_triton.GATED, other=x)
        heads, place = torch.randn(tokens, 2, 64, device="cuda").bfloat16(), torch.arange(tokens, device="cuda")
        turned_triton.turned_back((heads,) * 3, heads[:, 0], heads[:, 0], place, place[: copies * 16].view(-1, copies))

    run(33, 2)
    compiled = [len(kernel._kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]
    for tokens, copies in ((48, 1), (65, 3), (256, 16)):
        run(tokens, copies)
    assert compiled == [len(kernel._kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]
