"""Two runs of one config, bit by bit, and what is refused because it cannot be; fixed sums on their own."""

import os

import pytest
import torch

from lit_qrl.callbacks import AIS
from lit_qrl.errors import ConfigError
from lit_qrl.functional.diagnostics import ratio_quantiles
from lit_qrl.rollout.embedded.sampling import TokenSampler, running_sums
from lit_qrl.rollout.vllm.engine import VLLMEngine
from lit_qrl.run.torch_settings import VARIABLES, make_deterministic
from lit_qrl.types import SamplingParams
from tests.tables import csv_rows
from tests.tiny_run import build, fit, model_folder, parameters_of

CLOCKS = ("time/", "per_second")


@pytest.fixture(autouse=True)
def left_as_found(monkeypatch):
    """Without the variables, and with everything put back afterwards."""
    for name in [*VARIABLES, "HOROVOD_FUSION_THRESHOLD"]:
        monkeypatch.setenv(name, "")  # remembered, and removed again
        monkeypatch.delenv(name)
    switches = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = switches[:2]
    torch.set_float32_matmul_precision(switches[2])


def test_nothing_is_set_for_a_trainer_that_is_not_deterministic():
    torch.set_float32_matmul_precision("high")
    assert not make_deterministic()
    assert not VARIABLES.keys() & os.environ.keys()
    assert torch.get_float32_matmul_precision() == "high"


def test_every_variable_and_switch_is_set():
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    torch.use_deterministic_algorithms(True)
    os.environ["NCCL_ALGO"] = "Tree"
    assert make_deterministic()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
    assert os.environ["NCCL_ALGO"] == "Tree"
    assert VARIABLES.keys() <= os.environ.keys()
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_that_allows_other_bits_is_refused_by_name(name):
    torch.use_deterministic_algorithms(True)
    os.environ[name] = "something"
    with pytest.raises(ConfigError, match=f"{name}.*something"):
        make_deterministic()


def rows(folder):
    return [
        {k: v for k, v in row.items() if not any(c in k for c in CLOCKS)}
        for row in csv_rows(folder / "run" / "metrics.csv")
    ]


def twice(tmp_path, **options):
    """Metrics and weights of two runs."""
    found = []
    for name in ("first", "second"):
        _, module, _ = fit(tmp_path / name, trainer={"deterministic": True, "max_epochs": 3}, **options)
        found.append((rows(tmp_path / name), parameters_of(module)))
    return found


def test_two_deterministic_runs_are_equal_to_the_last_bit(tmp_path):
    (metrics, weights), (again, others) = twice(tmp_path, callbacks=[AIS()], data={"mini_batches": 2})
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["NCCL_ALGO"] == "Ring"
    assert metrics == again
    assert float(metrics[-1]["mismatch/abs_log_ratio"]) > 0
    assert weights.equal(others)


@pytest.mark.vllm
def test_two_deterministic_runs_through_vllm_are_equal_to_the_last_bit(tmp_path):
    from tests import vllm_cpu_shim

    vllm_cpu_shim.install()
    for name in ("first", "second"):  # of sizes that its kernels take
        model_folder(tmp_path / name / "model", hidden_size=128, intermediate_size=256, head_dim=32)
    (metrics, weights), (again, others) = twice(tmp_path, engine=VLLMEngine(max_num_seqs=16))
    assert metrics == again
    assert float(metrics[-1]["mismatch/abs_log_ratio"]) > 0
    assert weights.equal(others)


def test_an_environment_that_answers_in_its_own_time_is_refused(tmp_path, monkeypatch):
    trainer, module, data = build(tmp_path, trainer={"deterministic": True})
    monkeypatch.setattr("lit_qrl.data.module.TakesTurns", type(data.task))
    with pytest.raises(ConfigError, match=r"how long the environment takes.*Given: DigitTask"):
        trainer.fit(module, datamodule=data)


def test_sums_of_a_deterministic_trainer_add_integers():
    shares = torch.rand(3, 1000, generator=torch.Generator().manual_seed(0))
    usual = running_sums(shares)
    torch.use_deterministic_algorithms(True)
    exact = running_sums(shares)
    torch.testing.assert_close(exact, shares.double().cumsum(-1), rtol=0, atol=1000 * 2**-40)
    torch.testing.assert_close(exact.float(), usual, rtol=1e-5, atol=0)
    # the same whatever the order in which halves are added
    halves = torch.cat((running_sums(shares[:, :500]), running_sums(shares)[:, 500:]), dim=1)
    assert halves.equal(exact)


def test_tokens_are_drawn_alike_by_both_kinds_of_sums():
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    uniform = torch.rand(64, generator=torch.Generator().manual_seed(1))
    sampler = TokenSampler(SamplingParams(max_tokens=1, top_p=0.9))
    tokens, logprobs = sampler.draw(sampler.processed(logits), uniform)
    torch.use_deterministic_algorithms(True)
    again, same = sampler.draw(sampler.processed(logits), uniform)
    assert again.equal(tokens)
    assert same.equal(logprobs)
    assert ratio_quantiles(torch.tensor([0.0, 2.0**24, 1.0]), [0.5]).item() == 1.0
