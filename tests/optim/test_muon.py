from copy import deepcopy

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR

from lit_qrl.errors import ConfigError
from lit_qrl.optim.muon import EMBEDDINGS, MuonAdamW
from tests.networks import build_network
from tests.tiny_run import fit, interrupted, parameters_of
from tests.two_processes import one_process


def model(seed=0):
    torch.manual_seed(seed)
    return nn.ModuleDict(
        {
            "embed": nn.Embedding(7, 6),
            "up": nn.Linear(6, 10),
            "down": nn.Linear(10, 6, bias=False),
            "norm": nn.LayerNorm(6),
        }
    )


def set_gradients(module, step):
    generator = torch.Generator().manual_seed(step)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def train(module, optimizer, steps, scheduler=None, first=0):
    for step in range(first, first + steps):
        set_gradients(module, step)
        optimizer.step()
        if scheduler:
            scheduler.step()


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_a_language_model_is_split_by_the_authors_rule():
    network = build_network(tie_word_embeddings=False)
    named = {g["algorithm"]: g["param_names"] for g in MuonAdamW(network.named_parameters()).param_groups}
    inputs, outputs = network.get_input_embeddings().weight, network.get_output_embeddings().weight
    for name, parameter in network.named_parameters():
        hidden = parameter.ndim == 2 and parameter is not inputs and parameter is not outputs
        assert name in named["muon" if hidden else "adamw"]


def test_factors_of_an_adapter_are_hidden_matrices_unless_excluded():
    factors = [("layers.0.q_proj.lora_A.default.weight", nn.Parameter(torch.zeros(2, 8)))]
    factors += [("layers.0.q_proj.lora_B.default.weight", nn.Parameter(torch.zeros(8, 2)))]
    factors += [("embed_tokens.lora_embedding_A.default", nn.Parameter(torch.zeros(2, 8)))]
    assert [len(group["params"]) for group in MuonAdamW(factors).param_groups] == [2, 1]
    with pytest.raises(ConfigError, match="no hidden matrix"):
        MuonAdamW(factors, adamw=[*EMBEDDINGS, "*lora_*"])
    with pytest.raises(ConfigError, match="by their names"):
        MuonAdamW(parameter for _, parameter in factors)


@pytest.mark.parametrize(
    ("own", "of_adamw"),
    [({}, {}), ({"momentum": 0.8, "nesterov": False, "ns_steps": 3}, {"betas": (0.8, 0.9), "eps": 1e-2})],
)
def test_it_is_the_two_optimizers_of_torch_bit_for_bit_under_a_schedule(own, of_adamw):
    module, twin = model(), model()
    both = MuonAdamW(module.named_parameters(), lr=1e-2, weight_decay=0.1, **own, **of_adamw)
    hidden = [twin.up.weight, twin.down.weight]
    rest = [twin.embed.weight, twin.up.bias, twin.norm.weight, twin.norm.bias]
    parts = [
        torch.optim.Muon(hidden, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw", **own),
        torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.1, **of_adamw),
    ]

    def half(step):
        return 0.5**step

    schedules = [LambdaLR(part, half) for part in parts]
    schedule = LambdaLR(both, half)
    for step in range(4):
        train(module, both, 1, schedule, first=step)
        set_gradients(twin, step)
        for part, one in zip(parts, schedules, strict=True):
            part.step()
            one.step()
    assert [group["lr"] for group in both.param_groups] == [1e-2 / 16] * 2
    assert same(module, twin)


def test_a_copied_optimizer_steps_its_own_parameters():
    module = model()
    optimizer = MuonAdamW(module.named_parameters(), lr=1e-2)
    train(module, optimizer, 1)
    module_copy, optimizer_copy = deepcopy((module, optimizer))
    train(module_copy, optimizer_copy, 1, first=1)
    assert not same(module, module_copy)
    train(module, optimizer, 1, first=1)
    assert same(module, module_copy)


def test_parameters_without_a_gradient_stay():
    module = model()
    before = deepcopy(module)
    optimizer = MuonAdamW(module.named_parameters(), lr=1e-2)
    optimizer.zero_grad(set_to_none=True)
    assert optimizer.step(lambda: 3.0) == 3.0
    assert same(module, before)


# ------------------------------------------------------------------------------------------------------ in a whole run


class Norms(Callback):
    """Remembers the gradient's norm after clipping."""

    def __init__(self):
        self.norms = []

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if gradients:
            self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))


def muon(parameters):
    return MuonAdamW(parameters, lr=1e-2)


def test_a_run_with_muon_clips_and_resumes_bit_for_bit(tmp_path):
    clipped = {"gradient_clip_val": 0.01, "max_epochs": 4}
    options, seen = {"optimizer": muon, "model": {"lr_schedule": "cosine"}, "trainer": clipped}, Norms()
    _, whole, _ = fit(tmp_path / "whole", **options, callbacks=[seen])
    assert seen.norms
    assert max(seen.norms) < 0.0101
    # The schedule knows the whole run's length, so the first half is a run of 4 that is interrupted.
    saved = interrupted(tmp_path / "cut", at=2, **options)
    trainer, module, _ = fit(tmp_path / "cut", **options, ckpt_path=saved)
    assert trainer.current_epoch == 4
    assert torch.equal(parameters_of(whole), parameters_of(module))


def test_a_matrix_that_processes_share_takes_the_step_of_a_whole_one(tmp_path):
    with one_process(tmp_path) as mesh:
        whole, divided = model(), model()
        for module in divided.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
        optimizers = [MuonAdamW(one.named_parameters(), lr=0.01, weight_decay=0.1) for one in (whole, divided)]
        for step in range(3):
            set_gradients(whole, step)
            for mine, theirs in zip(divided.parameters(), whole.parameters(), strict=True):
                mine.grad = distribute_tensor(theirs.grad.clone(), mesh, [Shard(0)])
            for optimizer in optimizers:
                optimizer.step()
        for name, parameter in divided.named_parameters():
            wanted = whole.get_parameter(name)
            assert torch.allclose(parameter.full_tensor(), wanted, rtol=0, atol=1e-7), name
        kept = optimizers[1].state[divided["up"].weight]["momentum_buffer"]
        assert torch.allclose(kept.full_tensor(), optimizers[0].state[whole["up"].weight]["momentum_buffer"])
