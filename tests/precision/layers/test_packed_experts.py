import pytest
import torch

from lit_qrl.precision.layers import packed_experts
from lit_qrl.precision.layers.packed_linear import PackedLinear
from tests.precision.test_packed_lora import packed_experts as under_adapter


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_one_product_of_all_experts_is_that_of_each(kind, monkeypatch):
    policy, _, _ = under_adapter(kind)
    network, ids = policy.network, torch.arange(3, 13)[None]
    trained = {name: one for name, one in network.named_parameters() if one.requires_grad}

    def computed():
        network.zero_grad()
        logits = network(ids).logits.log_softmax(-1)
        logits[..., 5].sum().backward()
        return logits.detach(), {name: one.grad.clone() for name, one in trained.items() if one.grad is not None}

    (expected, grads), asked = computed(), []
    monkeypatch.setattr(packed_experts, "can_group", lambda stack, x: asked.append(x.dtype) or True)
    got, found = computed()
    assert len(asked) >= 2
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found, grads, atol=1e-5, rtol=1e-4)


def test_matrices_of_all_experts_are_multiplied_out_in_one_call(monkeypatch):
    policy, _, _ = under_adapter("qwen3_moe")
    (experts, *_) = (one for one in policy.network.modules() if isinstance(one, packed_experts.PackedExperts))
    layers = [experts.get_submodule(f"{expert}.up_proj") for expert in range(experts.stack.count)]
    expected = torch.stack([layer.dequantized(torch.float32) for layer in layers])
    like = torch.zeros(1)
    monkeypatch.setattr(PackedLinear, "dequantized", None)
    assert torch.equal(experts._dequantized("up_proj", like), expected)
    monkeypatch.undo()
    layers[1].set_weight(layers[1].weight_on(torch.device("cpu")))
    layers[1].codes = layers[1].codes.clone()  # as it is after a move
    assert torch.equal(experts._dequantized("up_proj", like), expected)
