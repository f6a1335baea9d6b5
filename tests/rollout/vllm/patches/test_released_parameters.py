from types import SimpleNamespace

import pytest
import torch

from lit_qrl.rollout.vllm.patches.released_parameters import declare


def test_what_packing_released_is_none_again_and_the_rest_is_left(fake):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].quant_method = object()
    restored = SimpleNamespace(restore_metadata=({"weight": 0, "g_idx": 0}, {"lut": 0}))
    fake("vllm.model_executor.model_loader.reload.layerwise", get_layerwise_info=lambda module: restored)
    weight = model[0].weight
    declare(model)
    assert model[0].weight is weight
    assert model[0].g_idx is model[0].lut is None
    with pytest.raises(AttributeError):
        _ = model[1].g_idx  # no method asks for it
