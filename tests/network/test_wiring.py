import pytest
import torch

from lit_qrl.network.wiring import norms_before_projections
from lit_qrl.precision.layers.one_pass import take_one_pass
from lit_qrl.precision.layers.residual import join_layers
from tests.families.configs import BY_TYPE, random_network

ATTENTION = ["q_proj", "k_proj", "v_proj"]
MLP = ["gate_proj", "up_proj"]
EXPECTED = {
    "llama": {"input_layernorm": ATTENTION, "post_attention_layernorm": MLP},
    "gemma2": {"input_layernorm": ATTENTION, "pre_feedforward_layernorm": MLP},
    "gemma3_text": {"input_layernorm": ATTENTION, "pre_feedforward_layernorm": MLP},
    "glm4": {"input_layernorm": ATTENTION, "post_attention_layernorm": ["gate_up_proj"]},
    "olmo2": {},  # norms stand behind attention and MLP alone
    "phi3": {"input_layernorm": ["qkv_proj"], "post_attention_layernorm": ["gate_up_proj"]},
    "cohere2": {"input_layernorm": [*ATTENTION, *MLP]},
    "gpt_neox": {"input_layernorm": ["query_key_value"], "post_attention_layernorm": ["dense_h_to_4h"]},
    "qwen3_moe": {"input_layernorm": ATTENTION, "post_attention_layernorm": ["experts"]},
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_norms_are_chosen_by_what_reads_them(kind):
    network = random_network(BY_TYPE[kind])
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    found = norms_before_projections(network)
    parts = {}
    for norm, readers in found.items():
        leaf = norm.removesuffix(".weight").rpartition(".")[2]
        parts.setdefault(leaf, set()).update(reader.rpartition(".")[2] for reader in readers)
    assert parts == {leaf: set(readers) for leaf, readers in EXPECTED[kind].items()}
    assert len(found) == 2 * len(EXPECTED[kind])  # of each layer
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


def test_fused_norms_hand_on_their_sum_too_and_are_found_all_the_same():
    network = random_network(BY_TYPE["llama"])
    plain = norms_before_projections(network)
    assert take_one_pass(network, True)
    join_layers(network)
    assert norms_before_projections(network) == plain
