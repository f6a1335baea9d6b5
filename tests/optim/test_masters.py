import copy
import functools
import io
import logging
import math
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lit_qrl.errors import ConfigError
from lit_qrl.optim import MuonAdamW
from lit_qrl.optim.masters import MasterWeights, join, split, trained_by
from tests.tiny_run import Twin, fit, interrupted, parameters_of


def adamw(named):
    return torch.optim.AdamW(named, lr=1e-6, weight_decay=0.01)


def adamw_of_8_bits(named):
    return import_module("bitsandbytes").optim.AdamW8bit(named, lr=1e-6, weight_decay=0.01)


def muon(named):
    return MuonAdamW(named, lr=1e-6)


def sgd(named):
    return torch.optim.SGD(named, lr=1e-6, momentum=0.9)


def named_weights(dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (7, 6), "up.weight": (10, 6), "norm.weight": (6,)}
    return [(name, nn.Parameter((0.02 * torch.randn(s, generator=generator)).to(dtype))) for name, s in shapes.items()]


def train(optimizer, steps, first=0, scheduler=None):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            # what bf16 and fp16 hold alike, so that runs of several dtypes have the same gradients
            gradient = torch.randn(parameter.shape, generator=generator).bfloat16().to(parameter.dtype)
            parameter.grad = gradient
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


# ------------------------------------------------------------------------------------------------------------- the bits


def test_every_fp32_number_is_had_again_from_its_bf16_part_and_16_bits():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2**20,), generator=generator).to(torch.int32)
    halfway = (torch.arange(-(2**15), 2**15).to(torch.int32) << 16) | 0x8000
    ends = torch.tensor([0, -(2**31), 0x7F800000, 0x7F7FFFFF, 0x7FC00000, 0x7FFFFFFF, -1], dtype=torch.int64)
    master = torch.cat([bits, halfway, ends.to(torch.int32)]).view(torch.float32)
    weight, low = split(master, torch.bfloat16)
    again = join(weight, low)
    nan = master.isnan()
    assert torch.equal(again[~nan].view(torch.int32), master[~nan].view(torch.int32))
    assert again[nan].isnan().all()
    assert weight[nan].isnan().all()  # a publish refuses it
    nearest = master.bfloat16()
    differing = ~nan & (weight != nearest)
    assert (low[differing] == -(2**15)).all()  # only where two are equally near
    error = (weight[differing].double() - master[differing].double()).abs()
    assert torch.equal(error, (nearest[differing].double() - master[differing].double()).abs())


def test_fp16_and_16_bits_hold_what_fp32_does_in_its_range():
    generator = torch.Generator().manual_seed(0)
    size = torch.empty(2**18).uniform_(math.log(6.2e-5), math.log(6e4), generator=generator).exp()
    master = size * torch.randn(size.shape, generator=generator).sign()
    weight, low = split(master, torch.float16)
    assert torch.equal(weight, master.half())
    assert torch.equal(join(weight, low), master)
    small = 1e-5 * torch.randn(2**16, generator=generator)
    assert float((join(*split(small, torch.float16)) - small).abs().max()) <= 2**-40
    assert split(torch.tensor([1e6, math.nan]), torch.float16)[0].isfinite().sum() == 0


# -------------------------------------------------------------------------------------------------------- the optimizer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", [adamw, muon, sgd, adamw_of_8_bits])
def test_masters_go_the_way_of_fp32_weights_bit_for_bit(optimizer, dtype):
    low = named_weights(dtype)
    exact = [(name, nn.Parameter(weight.detach().float())) for name, weight in low]
    over_low, over_exact = MasterWeights(low, optimizer, bucket_elements=50), optimizer(exact)
    schedules = [LambdaLR(one, lambda step: 0.9**step) for one in (over_low, over_exact)]
    train(over_low, 20, scheduler=schedules[0])
    train(over_exact, 20, scheduler=schedules[1])
    for (_, weight), (_, whole) in zip(low, exact, strict=True):
        if dtype == torch.bfloat16:
            assert torch.equal(over_low.master(weight), whole.detach())
        # below 6e-5 fp16's masters have a fixed point
        assert float((over_low.master(weight) - whole.detach()).abs().max()) <= 20 * 2**-40
        assert torch.equal(weight.detach(), split(whole.detach(), dtype)[0])


@pytest.mark.parametrize("optimizer", [adamw, muon, sgd, adamw_of_8_bits])
def test_a_restored_state_continues_bit_for_bit(optimizer):
    whole, half = named_weights(), named_weights()
    unbroken = MasterWeights(whole, optimizer)
    train(unbroken, 6)
    first = MasterWeights(half, optimizer)
    train(first, 3)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = MasterWeights(half, optimizer)
    second.load_state_dict(torch.load(file, weights_only=True))
    train(second, 3, first=3)
    for (_, a), (_, b) in zip(whole, half, strict=True):
        assert torch.equal(unbroken.master(a), second.master(b))


def test_the_low_bits_are_what_a_state_without_them_lacks():
    weights = named_weights()
    plain = adamw(weights)
    train(plain, 2)
    over = MasterWeights(weights, adamw)
    train(over, 1)
    over.load_state_dict(copy.deepcopy(plain.state_dict()))
    name, weight = weights[1]
    assert torch.equal(over.master(weight), weight.detach().float()), name
    # and the other way round, an optimizer without masters takes the moments
    again = adamw(weights)
    again.load_state_dict(over.state_dict())
    assert again.state[weight]["step"] == 2


def test_weights_of_32_bits_are_stepped_on_in_place_and_once():
    low, whole = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(3))
    over = MasterWeights([("a", low), ("b", whole)], lambda n: torch.optim.SGD(n, lr=1.0), bucket_elements=1)
    place, version = whole.data_ptr(), whole._version
    train(over, 3)
    expected = sum(
        (torch.randn(3, generator=g), torch.randn(3, generator=g).bfloat16().float())[1]
        for g in (torch.Generator().manual_seed(step) for step in range(3))
    )
    torch.testing.assert_close(whole.detach(), -expected)
    assert whole.data_ptr() == place
    assert whole._version > version  # what is cached of it is made anew


def test_no_more_than_a_bucket_exists_in_fp32():
    seen = []

    class Spy(torch.optim.SGD):
        def step(self, closure=None):
            held = [p for group in self.param_groups for p in group["params"]]
            seen.append(sum(p.untyped_storage().nbytes() for p in held if p.grad is not None))
            return super().step(closure)

    weights = [(f"w{i}", nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16))) for i in range(5)]
    over = MasterWeights(weights, lambda named: Spy(named, lr=1.0), bucket_elements=128)
    assert sum(p.untyped_storage().nbytes() for g in over.inner.param_groups for p in g["params"]) == 5 * 4
    train(over, 1)
    assert seen == [2 * 64 * 4, 2 * 64 * 4, 64 * 4]
    assert all(p.grad is None for g in over.inner.param_groups for p in g["params"])


def test_an_optimizer_that_counts_steps_in_its_groups_counts_one_a_step():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1
            return super().step(closure)

    over = MasterWeights(named_weights(), lambda named: Counting(named, lr=1e-3), bucket_elements=1)
    train(over, 4)
    assert over.param_groups[0]["k"] == 4


def test_parameters_without_a_gradient_stay_and_the_closure_runs():
    weights = named_weights()
    over = MasterWeights(weights, adamw)
    before = [weight.detach().clone() for _, weight in weights]
    assert over.step(lambda: 3.0) == 3.0
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, weights, strict=True))


# ---------------------------------------------------------------------------------------------------- which runs get it


def test_masters_are_kept_where_a_trained_parameter_has_fewer_than_32_bits(caplog):
    caplog.set_level(logging.WARNING)
    assert isinstance(trained_by(adamw, named_weights(), True), MasterWeights)
    assert isinstance(trained_by(adamw, named_weights(torch.float32), True), torch.optim.AdamW)
    assert not caplog.text
    assert isinstance(trained_by(adamw, named_weights(), False), torch.optim.AdamW)
    assert "weights in bfloat16 round each update" in caplog.text
    with pytest.raises(ConfigError, match="A loss scaler takes no gradients in fp16"):
        trained_by(adamw, named_weights(torch.float16), True, scaler=object())


# ------------------------------------------------------------------------------------------------------ bytes of memory

NUMERICS = Path(__file__).parents[2] / "docs" / "numerics.md"
# What it says of full fine-tuning, in bytes a parameter: weight, low bits, gradient, optimizer.
TABLE = {
    "bf16, AdamW": (torch.bfloat16, adamw, (2, 2, 2, 8)),
    "bf16, AdamW8bit": (torch.bfloat16, adamw_of_8_bits, (2, 2, 2, 2)),
    "bf16, MuonAdamW": (torch.bfloat16, muon, (2, 2, 2, 4)),
    "fp32, AdamW": (torch.float32, adamw, (4, 0, 4, 8)),
    "fp32, AdamW8bit": (torch.float32, adamw_of_8_bits, (4, 0, 4, 2)),
    "fp32, MuonAdamW": (torch.float32, muon, (4, 0, 4, 4)),
}


def storage(tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def state_tensors(optimizer):
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]


@pytest.mark.parametrize("name", TABLE)
def test_bytes_of_a_parameter_are_those_of_the_table(name):
    dtype, optimizer, expected = TABLE[name]
    count = 2**16  # large enough for one number of 32 bits to every 256 of 8 to be all that 8 bits add
    weight = nn.Parameter(torch.zeros(256, count // 256, dtype=dtype))
    one = trained_by(optimizer, [("up.weight", weight)], True)
    weight.grad = torch.ones_like(weight)
    one.step()
    over = isinstance(one, MasterWeights)
    parts = (
        storage([weight]),
        storage(state_tensors(one)) if over else 0,
        storage([weight.grad]),
        storage(state_tensors(one.inner if over else one)),
    )
    assert [part / count for part in parts] == pytest.approx(expected, abs=0.07)
    (row,) = (line for line in NUMERICS.read_text().splitlines() if line.startswith(f"| {name} "))
    cells = [float(cell) for cell in row.split("|")[2:7]]
    assert cells == [*expected, sum(expected)]


# ------------------------------------------------------------------------------------------------------- in a whole run


BF16 = {"policy": {"dtype": "bf16"}, "optimizer": adamw, "format": "bf16"}


def masters_of(trainer):
    optimizer = trainer.optimizers[0]
    return torch.cat([optimizer.master(p).flatten() for group in optimizer.param_groups for p in group["params"]])


@pytest.mark.parametrize("precision", ["bf16-true", "32-true"])
def test_a_bf16_run_at_a_small_rate_realizes_the_update_of_fp32(tmp_path, precision):
    twin = Twin(adamw)
    options = {"precision": precision, "max_epochs": 6, "gradient_clip_val": 1.0}
    trainer, module, _ = fit(tmp_path, **BF16, callbacks=[twin], trainer=options)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    wanted, found = twin.weights() - twin.start, masters_of(trainer) - twin.start
    assert float(found @ wanted / (wanted @ wanted)) == pytest.approx(1, abs=0.01)
    assert float((found != 0).float().mean()) > 0.95 * float((wanted != 0).float().mean())


def test_a_resumed_bf16_run_equals_the_unbroken_one(tmp_path):
    settings = {"precision": "bf16-true", "max_epochs": 4, "gradient_clip_val": 0.5}
    options = {**BF16, "model": {"lr_schedule": "cosine"}, "trainer": settings}
    whole, module, _ = fit(tmp_path / "whole", **options)
    saved = interrupted(tmp_path / "cut", at=2, **options)
    lows = torch.load(saved, weights_only=True)["optimizer_states"][0]["masters"]
    assert any(int(low.count_nonzero()) for low in lows)
    trainer, resumed, _ = fit(tmp_path / "cut", **options, ckpt_path=saved)
    assert torch.equal(parameters_of(module), parameters_of(resumed))
    assert torch.equal(masters_of(whole), masters_of(trainer))


def test_without_masters_a_run_says_what_it_loses(tmp_path, caplog):
    fit(tmp_path, **BF16, model={"master_weights": False}, trainer={"precision": "bf16-true", "max_epochs": 1})
    assert "model.master_weights is false" in caplog.text


@pytest.mark.gpu
def test_adam_over_16_bits_on_a_gpu_takes_torch_s_kernel_unless_told():
    def steps(**options):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(64, 64, device="cuda").bfloat16())
        optimizer = trained_by(functools.partial(torch.optim.AdamW, lr=1e-2, **options), [("w", weight)], masters=False)
        for _ in range(3):
            weight.grad = torch.randn_like(weight)
            optimizer.step()
        again = torch.optim.AdamW([weight], lr=1e-2)
        again.load_state_dict(optimizer.state_dict())
        again.step()
        return optimizer.param_groups[0]["fused"], weight.detach().float()

    (ours, made), (asked, plain) = steps(), steps(foreach=True)
    assert ours is True
    assert not asked
    assert (made - plain).norm() <= 0.01 * plain.norm()
