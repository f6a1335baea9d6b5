import pytest
import torch
from lightning.pytorch import Trainer
from peft import LoraConfig
from torch.utils.data import DataLoader, TensorDataset

from lit_qrl.formats import Int4Group
from lit_qrl.precision import NVFP4LoRA, QATAligned, UnifiedFP8
from tests.precision.toy import LENGTH, VOCABULARY, Module, Policy
from tests.two_processes import RANKS, in_two, join

# 64 sequences of 6 tokens are three blocks of 128: the weight's gradient in FP8 sums blocks of tokens, and those of two
# halves are those of the whole only where the cut is between blocks.
ROWS, STEPS = 64, 3
PLUGINS = {
    "aligned": lambda: QATAligned(Int4Group(32)),
    "unified": lambda: UnifiedFP8("emulate"),
    "lora": lambda: NVFP4LoRA("nvfp4"),
}


class Sharing(Module):
    def __init__(self, name):
        lora = LoraConfig(r=4, target_modules="all-linear") if name == "lora" else None
        super().__init__(Policy(lora=lora), optimizer=torch.optim.SGD, steps_lr=0.1)
        self.gradients = []

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(3)
        tokens = torch.randint(0, VOCABULARY, (STEPS, RANKS, ROWS, LENGTH), generator=generator)
        ranks = self.trainer.world_size
        mine = tokens[:, self.trainer.global_rank] if ranks > 1 else tokens.flatten(1, 2)
        return DataLoader(TensorDataset(mine.flatten(0, 1)), batch_size=ROWS * RANKS // ranks)

    def on_before_optimizer_step(self, optimizer):
        trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        assert all(p.grad is not None for p in trained.values())
        self.gradients.append({name: p.grad.clone() for name, p in trained.items()})


def learn(name, folder, ranks):
    module = Sharing(name)
    run = Trainer(
        max_epochs=1, plugins=[PLUGINS[name]()], accelerator="cpu", devices=ranks, logger=False,
        strategy="ddp" if ranks > 1 else "auto", use_distributed_sampler=False, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    run.fit(module)
    weights = {key: p.detach().clone() for key, p in module.named_parameters()}
    return {"gradients": module.gradients, "weights": weights}


def learn_each(rank, ports, folder):
    learned = {}
    for name in PLUGINS:
        join(rank, ports)
        learned[name] = learn(name, folder, RANKS)
    return learned


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return in_two(learn_each, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@pytest.mark.parametrize("name", PLUGINS)
def test_two_processes_learn_what_one_learns(name, ranks, tmp_path):
    first, second = (rank[name] for rank in ranks)
    alone = learn(name, tmp_path, 1)
    assert first["weights"].keys() == alone["weights"].keys()
    for key, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][key]), key
    assert len(first["gradients"]) == len(alone["gradients"]) == STEPS
    for key, gradient in alone["gradients"][0].items():
        together = first["gradients"][0][key]
        assert torch.equal(together, second["gradients"][0][key])
        assert torch.allclose(together, gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max()) + 1e-9), key
    moved = [key for key, g in alone["gradients"][0].items() if g.abs().max() > 0]
    assert len(moved) >= len(alone["gradients"][0]) // 2
