"""What the CPU build of vLLM gets wrong, fault by fault; whole engines: tests/rollout/test_vllm_known_faults.py."""

from types import SimpleNamespace

import pytest
import torch
from lit_qrl_vllm_fast import cpu
from torch import distributed

from lit_qrl.rollout.vllm.patches import find

PATCHES = {one.name: one for one in cpu.CHANGES}


@pytest.mark.parametrize("by_token", [False, True])
def test_activations_are_quantized_as_a_loop_does(by_token, fake):
    ops = fake("vllm._custom_ops", scaled_fp8_quant=lambda *args: None)
    PATCHES["fp8_activations"].make()
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 5)[:, None]
    codes, scale = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=by_token)
    for row in range(5):
        amax = max(abs(float(v)) for v in (x[row] if by_token else x.flatten()))
        own = float(scale.flatten()[row if by_token else 0])
        assert own == pytest.approx(amax / 448, rel=1e-6)
        expected = (x[row] / scale.flatten()[row if by_token else 0]).to(torch.float8_e4m3fn)
        assert torch.equal(codes[row].view(torch.uint8), expected.view(torch.uint8))
    fixed, same = ops.scaled_fp8_quant(x, scale=torch.tensor([0.5]))
    assert float(same) == 0.5
    assert torch.equal(fixed.float(), (x / 0.5).clamp(-448, 448).to(torch.float8_e4m3fn).float())


def test_products_of_codes_are_made_without_onednn_and_it_is_there_again(fake):
    seen = []

    class Kernel:
        def apply_scaled_mm(self, *, A):
            seen.append(torch._C._get_mkldnn_enabled())
            return A

    names = [f"{scales}TorchFP8ScaledMMLinearKernel" for scales in ("PerTensor", "ChannelWise")]
    kernels = {name: type(name, (Kernel,), {"apply_scaled_mm": Kernel.apply_scaled_mm}) for name in names}
    fake("vllm.model_executor.kernels.linear.scaled_mm.pytorch", **kernels)
    PATCHES["fp8_products"].make()
    before = torch._C._get_mkldnn_enabled()
    assert [kernel().apply_scaled_mm(A=3) for kernel in kernels.values()] == [3, 3]
    assert (seen, torch._C._get_mkldnn_enabled()) == ([False, False], before)


def test_no_kernel_for_amx_is_taken(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    PATCHES["amx_kernels"].make()
    assert torch.cpu._is_amx_tile_supported() is False


def test_the_handle_holds_what_it_was_made_of(fake):
    made = []

    def create(*args):
        made.append(args)
        return SimpleNamespace()

    ops = fake("vllm._custom_ops", create_onednn_scaled_mm=create)
    for _ in range(2):
        PATCHES["onednn_operands"].make()
    weight, scales = torch.ones(2), torch.ones(1)
    handle = ops.create_onednn_scaled_mm(weight, scales, torch.float32, True)
    assert made == [(weight, scales, torch.float32, True)]
    assert handle.operands == (weight, scales)


@pytest.mark.parametrize("rows", [2, 5])
def test_every_row_has_the_adapter_of_its_batch_and_the_wrapper_is_as_before(rows):
    wrapper = SimpleNamespace(_sampler_indices=torch.tensor([3, 3, 0, 0, 0, 0]), indices_len=[6, 2])
    seen = []

    def original(wrapper, y, x, scale):
        seen.append((wrapper._sampler_indices[:rows].tolist(), wrapper.indices_len[1], scale))

    wrapper.sampler_indices = wrapper._sampler_indices[:2]
    cpu.by_token(original)(wrapper, None, torch.zeros(rows, 4), 0.5)
    assert seen == [([3] * rows, rows, 0.5)]
    assert wrapper._sampler_indices[:2].tolist() == [3, 3]
    assert wrapper.indices_len == [6, 2]


def turned(x, positions, base=10000.0):
    """Pairs of neighbours turned by position · base^(−2i/dim), entry by entry."""
    dim = x.shape[-1]
    angle = positions[:, None].double() * base ** (-torch.arange(0, dim, 2).double() / dim)
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], dim // 2, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)[:, None]).flatten(-2)


@pytest.mark.vllm
def test_queries_with_their_heads_apart_are_turned_right():
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    owner, name = find("vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_cpu")
    method = getattr(owner, name)
    original = getattr(method, "lit_qrl_original", method)
    with set_current_vllm_config(VllmConfig()):
        parameters = {"rope_theta": 10000.0, "rope_type": "default"}
        rotary = get_rope(32, 64, is_neox_style=False, rope_parameters=parameters, dtype=torch.float32)
    positions = torch.arange(6)
    query, key = torch.randn(6, 4, 32), torch.randn(6, 1, 32)
    expected = turned(query, positions), turned(key, positions)
    wrong, _ = original(rotary, positions, query.clone(), key.clone())
    assert (wrong - expected[0]).abs().max() > 1  # vLLM's fault
    got = cpu.by_head(original)(rotary, positions, query.clone(), key.clone())
    assert all(torch.allclose(one.double(), want, atol=1e-5) for one, want in zip(got, expected, strict=True))
    flat, _ = cpu.by_head(original)(rotary, positions, query.reshape(6, -1).clone(), key.reshape(6, -1).clone())
    assert torch.allclose(flat.view(6, 4, 32).double(), expected[0], atol=1e-5)


def test_two_engines_meet_in_memory_of_their_own_and_leave_no_name_behind(monkeypatch, tmp_path):
    told = []
    monkeypatch.setattr(cpu, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(
        distributed, "broadcast_object_list", lambda drawn, group, group_src: told.append((group, group_src))
    )
    names = []

    def original(shared):
        (tmp_path / f"{shared.group_name}_1").touch()
        (tmp_path / f"{shared.group_name}_0").touch()  # the other process's, which gives it back itself
        names.append(shared.group_name)
        return 7

    for _ in range(2):
        shared = SimpleNamespace(
            group_name="-tp:0-[0-1]-cpushm", communicator=SimpleNamespace(device_group="ours", rank=1)
        )
        assert cpu.of_the_run(original)(shared) == 7
    assert told == [("ours", 0)] * 2
    assert len(set(names)) == 2
    assert all(name.startswith("-tp:0-[0-1]-cpushm-") for name in names)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{name}_0" for name in names)
