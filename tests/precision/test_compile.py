"""Every plugin under torch.compile and under gradient checkpointing: the losses of a plain run."""

import pytest
import torch
from peft import LoraConfig

from lit_qrl.formats import FP8Block, Int4Group
from lit_qrl.precision import NVFP4LoRA, QATAligned, UnifiedFP8
from tests.precision.toy import Module, Policy, fit, weights_of

PLUGINS = {
    "aligned": lambda: QATAligned(Int4Group(32)),
    "aligned_block": lambda: QATAligned(FP8Block()),
    "unified": lambda: UnifiedFP8("emulate"),
    "lora": lambda: NVFP4LoRA("nvfp4"),
}


def module(name, checkpointing=False):
    lora = LoraConfig(r=4, target_modules="all-linear") if name == "lora" else None
    return Module(Policy(lora=lora, checkpointing=checkpointing))


class Compiled(Module):
    """Compiles the network's forward pass; the backend runs the captured graphs as they are."""

    graphs = 0

    def training_step(self, batch, index):
        if self.graphs == 0:
            self.policy.network.forward = torch.compile(self.policy.network.forward, backend=self.count)
        return super().training_step(batch, index)

    def count(self, graph, inputs):
        self.graphs += 1
        return graph.forward


@pytest.mark.parametrize("name", PLUGINS)
def test_checkpointing_changes_nothing(name, tmp_path):
    plain, _ = fit(tmp_path, PLUGINS[name](), module(name))
    saving, _ = fit(tmp_path, PLUGINS[name](), module(name, checkpointing=True))
    assert plain.losses == saving.losses
    for key, weight in weights_of(plain).items():
        assert torch.equal(weight, weights_of(saving)[key]), key


@pytest.mark.slow
@pytest.mark.parametrize("name", PLUGINS)
def test_a_compiled_network_learns_the_same(name, tmp_path):
    torch._dynamo.reset()
    plain, _ = fit(tmp_path, PLUGINS[name](), module(name))
    compiled = Compiled(module(name).policy)
    fit(tmp_path, PLUGINS[name](), compiled)
    assert compiled.graphs > 0
    assert len(set(plain.losses)) == len(plain.losses)  # it learned, with weights quantized anew in every step
    assert torch.allclose(torch.tensor(plain.losses), torch.tensor(compiled.losses), rtol=1e-5)
