"""Whole runs with the real vLLM on CPU: adapters beside a packed base, deaths, faults, and the quickstart."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lit_qrl.callbacks import RLCallback, TruncatedIS
from lit_qrl.cli.main import main
from lit_qrl.run.event_log import read_jsonl
from tests import vllm_cpu_shim
from tests.tables import csv_rows
from tests.tiny_run import Watch, build, model_folder, parameters_of

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parent.parent.parent
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


def build_run(folder, engine=None, callbacks=(), **options):
    """Return (trainer, module, data, watch) of a run whose engine is vLLM."""
    from lit_qrl.rollout.vllm.engine import VLLMEngine

    vllm_cpu_shim.install()
    model_folder(folder / "model", **SIZES)
    watch = Watch()
    options.setdefault("trainer", {}).setdefault("max_epochs", 3)
    trainer, module, data = build(folder, callbacks=[watch, *callbacks], **options)
    data.engine = VLLMEngine(max_num_seqs=16, **(engine or {}))
    return trainer, module, data, watch


class Truncated(RLCallback):
    """Keeps the largest |log-ratio| of each rollout over the kept tokens and over the whole vocabulary."""

    def __init__(self):
        self.apart, self.whole, self.sizes = [], [], []

    def on_rollout_end(self, trainer, module, rollout):
        for found, batch in ((self.apart, rollout), (self.whole, replace(rollout, kept=None))):
            difference = module.score(batch) - rollout.sampler_logprobs
            found.append(float((difference * rollout.mask).abs().max()))
        self.sizes.append(int((rollout.kept >= 0).sum(dim=2).max()))
        evaluated = module.data.engine.generate([[5, 6]], 1, seed=0, sampling=module.data.sampling)
        assert evaluated[0].kept is None


@pytest.mark.parametrize("truncation", [{"top_p": 0.9}, {"top_k": 5}, {"top_p": 0.7, "top_k": 8, "temperature": 1.5}])
def test_learner_and_sampler_agree_over_the_tokens_that_were_kept(tmp_path, truncation, margin):
    found = Truncated()
    trainer, module, data, _ = build_run(
        tmp_path,
        callbacks=[TruncatedIS(), found],
        format="auto",
        data={**truncation, "mini_batches": 2},
        trainer={"max_epochs": 2, "limit_val_batches": 1},
    )
    trainer.fit(module, data)
    assert len(found.apart) == 2
    assert max(found.apart) < 5e-6
    assert min(found.whole) > 1e-2  # what the whole vocabulary would have said
    assert max(found.sizes) <= truncation.get("top_k", 10**6)
    margin(f"kept through vLLM ({truncation}), |log-ratio| at most", f"{max(found.apart):.1e}")


def test_an_engine_that_dies_twice_is_built_again_and_the_run_is_the_same(tmp_path, monkeypatch):
    """Once by an error of vLLM's, once by a step that never returns."""
    from vllm.v1.engine.llm_engine import LLMEngine

    step, calls = LLMEngine.step, [0]
    crashes, hangs = 12, 26  # eight tokens an iteration, and one step for the probe

    def mortal(engine):
        calls[0] += 1
        if calls[0] == crashes:
            raise MemoryError("out of memory")
        if calls[0] == hangs:
            time.sleep(3600)
        return step(engine)

    ends = []
    for name in ("mortal", "immortal"):
        trainer, module, data, watch = build_run(tmp_path / name, engine={"step_timeout": 20.0})
        with monkeypatch.context() as patch:
            if name == "mortal":
                patch.setattr(LLMEngine, "step", mortal)
            trainer.fit(module, datamodule=data)
        ends.append((parameters_of(module), torch.cat([tokens.flatten() for tokens in watch.tokens])))
        assert watch.versions == [0, 1, 2]
    assert calls[0] > hangs
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    told = read_jsonl(tmp_path / "mortal" / "run" / "events.jsonl")
    messages = [event["message"] for event in told if event["kind"] == "engine_died"]
    assert len(messages) == 2
    assert "MemoryError: out of memory (restart 1 of 2)" in messages[0]
    assert "one step took longer than 20 s (restart 1 of 2)" in messages[1]


def test_the_quickstart_runs_with_vllm(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    arguments = ["fit", "--config", "configs/quickstart.yaml", "--config", "configs/engine/vllm.yaml"]
    options = {
        "trainer.max_epochs": 3,
        "trainer.check_val_every_n_epoch": 3,
        "data.evaluation_limit": 32,
        "trainer.default_root_dir": tmp_path,
        "publisher.probe_every": 1,
        "trainer.enable_progress_bar": "false",
    }
    main([*arguments, *(part for name, value in options.items() for part in (f"--{name}", str(value)))])
    rows = [row for row in csv_rows(tmp_path / "metrics.csv") if row.get("reward/mean")]
    assert len(rows) == 3
    for version, row in enumerate(rows):
        assert float(row["publish/version"]) == version
        assert float(row["publish/probe_mean"]) < float(row["publish/probe_bound"])
        assert 0 < float(row["mismatch/kl_k3"]) < 0.01
        assert float(row["reward/mean"]) > 0.2  # it starts at a third, and a garbled policy solves nothing
    assert (tmp_path / "report" / "index.html").is_file()
    assert (tmp_path / "checkpoints" / "last.ckpt").is_file()
