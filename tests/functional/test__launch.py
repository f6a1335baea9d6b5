"""Which launches take the compiled kernel of one before, with kernels that note what they are given, and on a GPU."""

from types import SimpleNamespace

import pytest
import torch

from lit_qrl.functional import _launch as launch


class Kernel:
    """Notes Triton's own launches, and those of what it compiled."""

    def __init__(self, compiled=True):
        self.own, self.again, self.compiled = [], [], compiled

    def run(self, *given):
        self.again.append(given)

    def __getitem__(self, grid):
        def start(*given, **options):
            self.own.append((grid, given, options))
            if self.compiled:
                return SimpleNamespace(run=self.run, function=7, packed_metadata=(8,))
            return None

        return start


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 99, raising=False)
    return Kernel()


def test_the_second_launch_takes_what_the_first_compiled(kernel):
    x, y = torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)
    start = launch.Launch(kernel)
    start((4,), (x, y), (64, 0.5), (True, 128), num_warps=8, maxnreg=None)
    start((5, 2), (x[16:], y), (64, 0.5), (True, 128), num_warps=8, maxnreg=None)
    assert kernel.own == [((4,), (x, y, 64, 0.5, True, 128), {"num_warps": 8, "maxnreg": None})]
    addresses = x[16:].data_ptr(), y.data_ptr()
    assert kernel.again == [(5, 2, 1, 99, 7, (8,), None, None, None, *addresses, 64, 0.5, True, 128)]


@pytest.mark.parametrize(
    ("dtype", "number", "constant", "warps", "start"),
    [
        (torch.float16, 64, 128, 8, 0),
        (torch.float32, 63, 128, 8, 0),
        (torch.float32, 64, 64, 8, 0),
        (torch.float32, 64, 128, 4, 0),
        (torch.float32, 64, 128, 8, 1),  # Triton takes another kernel where a pointer is not aligned
    ],
)
def test_a_launch_that_differs_asks_triton(dtype, number, constant, warps, start, kernel):
    one = launch.Launch(kernel)
    one((4,), (torch.zeros(64),), (64,), (128,), num_warps=8)
    one((4,), (torch.zeros(64, dtype=dtype)[start:],), (number,), (constant,), num_warps=warps)
    assert len(kernel.own) == 2
    assert not kernel.again


def test_a_kernel_for_all_numbers_is_asked_anew_for_another_width_alone(kernel):
    one = launch.Launch(kernel, specialized=False)
    x = torch.zeros(64)
    for number in (1, 16, 17, -(2**31), 2**31 - 1, 2**31, 2**62, -(2**31) - 1, 0):
        one((2, 3, 4), (x,), (number, 5), (128,), num_warps=8)
    assert [given[1] for _, given, _ in kernel.own] == [1, 2**31]
    assert [given[:3] for given in kernel.again] == [(2, 3, 4)] * 7
    assert [given[-3] for given in kernel.again] == [16, 17, -(2**31), 2**31 - 1, 2**62, -(2**31) - 1, 0]
    with pytest.raises(TypeError, match=r"Given: 0\.5"):
        one((1,), (x,), (0.5,), ())


def test_what_is_not_aligned_or_interpreted_is_not_kept(kernel):
    one = launch.Launch(kernel)
    for _ in range(2):
        one((4,), (torch.zeros(64)[1:],), (64,), ())
    assert (len(kernel.own), kernel.again) == (2, [])
    interpreted = Kernel(compiled=False)
    one = launch.Launch(interpreted)
    for _ in range(2):
        one((4,), (torch.zeros(64),), (64,), ())
    assert len(interpreted.own) == 2


def test_a_triton_whose_kernels_take_other_arguments_is_asked_each_time(kernel, monkeypatch):
    def other(*given):
        raise TypeError("function takes exactly 12 arguments (13 given)")

    monkeypatch.setattr(kernel, "run", other)
    one, x = launch.Launch(kernel), torch.zeros(64)
    for _ in range(4):
        one((4,), (x,), (64,), (128,), num_warps=8)
    assert [grid for grid, _, _ in kernel.own] == [(4,)] * 4
    assert not one._made


def test_lengths_of_a_long_run_are_not_kept_for_ever(kernel, monkeypatch):
    monkeypatch.setattr(launch, "MOST", 3)
    one = launch.Launch(kernel)
    for length in range(10):
        one((4,), (torch.zeros(64),), (length,), ())
    assert len(one._made) <= 3


def test_pieces_and_powers():
    for count in range(1, 70):
        assert (launch.pieces(count, 8) - 1) * 8 < count <= launch.pieces(count, 8) * 8
        assert launch.power_of_2(count) // 2 < count <= launch.power_of_2(count)


@pytest.mark.gpu
def test_kept_kernels_compute_the_same_on_the_device():
    from lit_qrl.formats.kernels import norm_triton, rotary_triton, values_triton

    def twice(x):
        return norm_triton.norm(x[None], x, 1e-6, residual=x[None], scale=False)[0][0]

    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        for length in (4096, 1000, 4096, 16, 4096):
            x = torch.randn(length + 1, device="cuda").to(dtype)
            for part in (x[:-1], x[1:], x[:-1]):  # aligned, not aligned, and with what the first compiled
                assert torch.equal(twice(part), part + part)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert torch.equal(twice(x), x + x)
    codes = torch.randn(64, 256, device="cuda").to(torch.float8_e4m3fn)
    for scales in (torch.rand(64, 1, device="cuda"), torch.rand(1, device="cuda"), torch.rand(64, 1, device="cuda")):
        made = values_triton.scaled_values(codes, scales, torch.float32)
        assert torch.equal(made, codes.float() * scales)
    q = torch.randn(300, 6, 64, device="cuda").bfloat16()
    angles = torch.rand(300, 64, device="cuda")
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    first = rotary_triton.rotate(q, cos, sin)
    assert torch.equal(rotary_triton.rotate(q, cos, sin), first)
    wide = torch.cat((q, q), dim=1)[:, :6]  # other strides
    assert torch.equal(rotary_triton.rotate(wide, cos, sin), first)
