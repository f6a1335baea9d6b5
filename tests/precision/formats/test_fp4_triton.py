"""The fused packing against the plain operations: interpreted on a CPU, compiled on a GPU."""

import os
import subprocess
import sys

import pytest
import torch

from lit_qrl.precision import formats
from lit_qrl.precision.formats.numerics import pack_nibbles, to_fp4_codes

INTERPRETED = """
import torch
from tests.precision.formats.test_fp4_triton import compare_codes
compare_codes(torch.device("cpu"))
print("same")
"""
TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -2.5, -5.0, 0.0, -0.0, 6.0, -9.0]


def compare_codes(device):
    from lit_qrl.precision.formats import fp4_triton

    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows, columns in ((8, 64), (5, 48), (130, 160)):
            values = (3 * torch.randn(rows, columns, generator=generator)).to(dtype)
            values[0, :16] = torch.tensor(TIES)
            divisors = 0.5 + torch.rand(rows, columns // 16, generator=generator)
            divisors[0, 0] = 1.0
            expected = pack_nibbles(to_fp4_codes(values.unflatten(-1, (-1, 16)) / divisors.unsqueeze(-1)).flatten(-2))
            made = fp4_triton.packed_quotients(values.to(device), divisors.to(device), 16)
            assert torch.equal(made.cpu(), expected)


@pytest.mark.vllm  # which brings Triton
def test_kernel_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.stdout.endswith("same\n"), done.stderr


@pytest.mark.gpu
def test_kernel_on_the_device():
    compare_codes(torch.device("cuda"))


@pytest.mark.gpu
def test_the_format_makes_the_codes_of_the_plain_operations(monkeypatch):
    from lit_qrl.precision.formats import fused

    weight = torch.randn(256, 512, device="cuda").bfloat16()
    made = formats.get("nvfp4").quantize(weight)
    monkeypatch.setattr(fused, "available", lambda x: False)
    plain = formats.get("nvfp4").quantize(weight)
    assert torch.equal(made.codes, plain.codes)
    assert torch.equal(made.scales.view(torch.uint8), plain.scales.view(torch.uint8))
    assert torch.equal(made.global_scale, plain.global_scale)
