"""Whole iterations by the kernels that a GPU takes, in Triton's interpreter, beside the same without a kernel."""

import importlib
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from peft import LoraConfig
from torch.nn import functional as F

from lit_qrl import policy
from lit_qrl.callbacks import TruncatedIS
from lit_qrl.formats.kernels import dispatch, gemm
from lit_qrl.functional import logprobs
from lit_qrl.network import memory
from lit_qrl.optim import masters
from lit_qrl.precision import UnifiedFP8
from lit_qrl.precision.layers import block_fp8, joined_linear, one_pass
from tests.networks import build_network
from tests.tiny_run import build
from tests.triton_interpreter import run_interpreted

SIZES = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_key_value_heads": 4}
"""The kernels take blocks of 128 columns, and block-scaled products of as many rows."""
ROLLOUT = {"group_size": 2, "max_completion_tokens": 4}
LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
TAKEN = {f"formats.kernels.{name}" for name in ("norm", "tiles", "turned")} | {"functional._logprobs"}


class Gradients(Callback):
    """Keeps the gradients of the last step."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen = {name: one.grad.float() for name, one in pl_module.named_parameters() if one.grad is not None}


def scaled_mm(a, b, scale_a, kind_a, scale_b, kind_b, output_dtype):
    """The block-scaled product of cuBLASLt in fp32."""
    assert kind_a == F.ScalingType.BlockWise1x128
    blocks = a.shape[1] // 128
    if kind_b == F.ScalingType.BlockWise128x128:
        scale_b = scale_b[:blocks].t().repeat_interleave(128, dim=0)
    rows, columns = (scale[:, :blocks].repeat_interleave(128, dim=1) for scale in (scale_a, scale_b))
    return ((a.float() * rows) @ (b.t().float() * columns).t()).to(output_dtype)


def play_gpu(patch):
    """Let the learner take the kernels of a GPU that has FP8."""
    importlib.import_module("tests.plain_instructions").use(patch)
    for name in ("available", "available_for_e4m3"):
        patch.setattr(dispatch, name, lambda x, kernel: True)
    patch.setattr(gemm, "has_fp8", lambda device: True)
    patch.setattr(gemm, "fp8_block_gemm", lambda device, shape: True)
    patch.setattr(gemm.F, "scaled_mm", scaled_mm)
    patch.setattr(block_fp8, "_block_gemm_missing", lambda device: None)
    patch.setattr(one_pass, "kernels_here", lambda: True)
    patch.setattr(joined_linear, "ROWS", 1)
    patch.setattr(logprobs, "_kernel_takes", lambda hidden: hidden.dtype == torch.bfloat16)
    patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 << 30))
    patch.setattr(masters, "_in_one_pass", lambda parameter: parameter.dtype == torch.bfloat16)


def iteration(patch, kernels, kept, prompts=1, lora=None, plugin=None):
    """Return gradients, and weights after the step, of an iteration whose last `kept` layers are not computed again.

    A micro-batch has one prompt.
    """

    def compute_again(network, layers, on_cpu):
        network.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": memory.recomputation})
        chosen = memory.SelectiveRecomputation(network)
        memory.body(network)._forward_pre_hooks.clear()  # nobody chooses
        chosen.kept, chosen._passes = kept, memory.MEASURED + 1
        return chosen

    patch.setattr(policy, "compute_again", compute_again)
    if kernels:
        play_gpu(patch)
    gradients = Gradients()
    precision = {"precision": "bf16-true"} if plugin is None else {"plugins": [plugin()]}
    with tempfile.TemporaryDirectory() as folder:
        trainer, module, data = build(
            Path(folder),
            callbacks=[TruncatedIS(), gradients],
            format="bf16" if plugin is None else "auto",
            network=lambda **sizes: build_network(**{**sizes, **SIZES}),
            policy={"dtype": "bf16", "fuse": kernels and plugin is None, "lora": lora},
            data={**ROLLOUT, "prompts_per_iteration": prompts, "micro_batches": prompts},
            trainer={"max_epochs": 1, **precision},
        )
        trainer.fit(module, datamodule=data)
    return gradients.seen, {name: one.detach().float() for name, one in module.named_parameters()}


def compare(error, **case):
    """Hold gradients to an error of their norms."""
    with pytest.MonkeyPatch.context() as patch:
        plain, before = iteration(patch, False, **case)
    with pytest.MonkeyPatch.context() as patch:
        ours, after = iteration(patch, True, **case)
    assert {f"lit_qrl.{name}_triton" for name in TAKEN} <= sys.modules.keys()
    assert plain.keys() == ours.keys()
    for name, gradient in plain.items():
        assert float((ours[name] - gradient).norm()) <= error * float(gradient.norm()) + 1e-6, name
    for name, weight in before.items():  # Adam's first step is of the learning rate, up or down
        assert float((after[name] - weight).abs().max()) <= 2.1 * 3e-3 + 0.01 * float(weight.abs().max()), name


def compare_cases(device):
    """Of two layers one is kept and one computed again, or both are; FP8 takes steps of 2⁻³ of last bits."""
    compare(0.03, kept=1, prompts=2)
    compare(0.03, kept=0, lora=LORA)
    compare(0.15, kept=1, plugin=UnifiedFP8)


@pytest.mark.vllm  # which brings Triton
def test_iterations_by_a_gpus_kernels_have_the_gradients_of_those_without():
    run_interpreted(compare_cases)
