from types import SimpleNamespace

import torch

from lit_qrl.rollout.vllm.patches.onednn_operands import PATCH


def test_the_handle_holds_what_it_was_made_of(fake):
    made = []

    def create(*args):
        made.append(args)
        return SimpleNamespace()

    ops = fake("vllm._custom_ops", create_onednn_scaled_mm=create)
    for _ in range(2):
        PATCH.apply((0, 32, 0))
    weight, scales = torch.ones(2), torch.ones(1)
    handle = ops.create_onednn_scaled_mm(weight, scales, torch.float32, True)
    assert made == [(weight, scales, torch.float32, True)]
    assert handle.operands == (weight, scales)
