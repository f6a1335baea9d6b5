"""Names by a model's own mappings, with the two methods of vLLM's mapper in place of the whole."""

from types import SimpleNamespace

import torch
from torch import nn

from lit_qrl.rollout.vllm.locations import Naming


class Mapper:
    """Renames by prefix and by part, and stacks."""

    def __init__(self, prefixes=(), parts=(), stacked=()):
        self.prefixes, self.parts, self.orig_to_new_stacked = dict(prefixes), dict(parts), dict(stacked)

    def get_rename_mapper(self):
        return Mapper(self.prefixes, self.parts)

    def _map_name(self, name):
        for old, new in self.parts.items():
            name = name.replace(old, new, 1)
        for old, new in self.prefixes.items():
            if name.startswith(old):
                name = new + name[len(old) :]
        return name


def wrapper():
    text = nn.Module()
    text.hf_to_vllm_mapper = Mapper(
        parts={".conv.": ".short_conv."},
        stacked={".q_proj": (".qkv_proj", "q"), ".v_proj": (".qkv_proj", "v"), ".in_qkv": (".in_qkvz", (0, 1, 2))},
    )
    text.layers = nn.ModuleList([nn.Linear(1, 1)])
    model = nn.Module()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "o_proj": ["o_proj"]}
    model.hf_to_vllm_mapper = Mapper(prefixes={"model.language_model.": "language_model."})
    model.language_model = text
    return model


def test_the_mappings_of_a_wrapper_and_of_what_is_inside_follow_each_other():
    naming = Naming(wrapper())
    assert naming.renamed("model.language_model.layers.0.conv.in_proj.weight") == (
        "language_model.layers.0.short_conv.in_proj.weight"
    )
    assert naming.renamed("lm_head.weight") == "lm_head.weight"


def test_a_mapping_that_a_wrapper_shows_again_is_followed_once():
    model = nn.Module()
    model.model = nn.Module()
    model.model.hf_to_vllm_mapper = model.hf_to_vllm_mapper = Mapper(parts={".conv.": ".short_conv."})
    assert Naming(model).renamed("model.layers.0.conv.conv.weight") == "model.layers.0.short_conv.conv.weight"


def test_a_tensor_that_a_checkpoint_calls_otherwise_is_learned():
    naming = Naming(wrapper())
    naming.learn("text.layers.0.norm.weight", "model.language_model.layers.0.norm.weight")
    assert naming.renamed("text.layers.0.norm.weight") == "language_model.layers.0.norm.weight"


def test_parts_come_with_the_widths_that_they_fill():
    naming = Naming(wrapper())
    layers = "language_model.layers.0"
    (found,) = naming.fused(f"{layers}.k_proj")
    assert found == (f"{layers}.qkv_proj", 1, ("q_proj", "k_proj", "v_proj"), (1,))
    (found,) = naming.fused(f"{layers}.in_qkv")
    assert found == (f"{layers}.in_qkvz", 0, ("in_qkv",), (0, 1, 2))
    assert list(naming.fused(f"{layers}.o_proj")) == []  # a single part is no fusion


def test_what_a_loader_rewrites_is_known():
    def composed_weight_loader():
        def composed(param, loaded):
            param.data.copy_(-loaded.exp())

        return composed

    naming = Naming(nn.Module())
    assert naming.rewrites("layers.0.mixer", SimpleNamespace(weight_loader=composed_weight_loader()))
    assert not naming.rewrites("layers.0.mixer", nn.Parameter(torch.ones(1)))
    turning = nn.Module()
    turning.permute_qk_weight_for_rotary = None
    assert [Naming(turning).rewrites(f"layers.0.{leaf}", None) for leaf in ("q_proj", "v_proj")] == [True, False]
