import pytest
import torch
from transformers import AutoModelForCausalLM

from lit_qrl.rollout.embedded.attention import FOLDED, attend_folded, take_norms
from lit_qrl.rollout.embedded.loading import skeleton
from tests.families.configs import BY_TYPE
from tests.networks import build_network


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("masked", [False, True])
def test_folded_attention_matches_a_loop(heads, key_heads, masked):
    torch.manual_seed(0)
    b, n, dim, scaling = 3, 7, 5, 0.3
    query = torch.randn(b, heads, 1, dim, dtype=torch.float64)
    key, value = torch.randn(2, b, key_heads, n, dim, dtype=torch.float64)
    mask = torch.ones(b, 1, 1, n, dtype=torch.bool)
    if masked:
        mask[1, ..., :3] = False
    out, _ = attend_folded(None, query, key, value, mask if masked else None, scaling=scaling)
    for row in range(b):
        seen = mask[row, 0, 0]
        for head in range(heads):
            owner = head // (heads // key_heads)
            scores = torch.stack([query[row, head, 0] @ k for k in key[row, owner][seen]]) * scaling
            expected = scores.softmax(0) @ value[row, owner][seen]
            torch.testing.assert_close(out[row, 0, head], expected)


@pytest.mark.parametrize("kind, attention", [("llama", FOLDED), ("falcon", "sdpa")])
def test_falcon_chooses_its_attention_by_a_table_of_its_own(kind, attention):
    network = AutoModelForCausalLM.from_config(BY_TYPE[kind].config())
    assert skeleton(network, torch.device("cpu")).config._attn_implementation == attention


def test_every_norm_of_a_network_is_replaced_once_under_its_name():
    network = build_network()
    names, tokens = list(network.state_dict()), torch.tensor([[3, 4, 5]])
    before = network(tokens).logits
    assert take_norms(network) == 2 * 4 + 1  # two layers, with those of queries and keys
    assert take_norms(network) == 0
    assert list(network.state_dict()) == names
    torch.testing.assert_close(network(tokens).logits, before)
