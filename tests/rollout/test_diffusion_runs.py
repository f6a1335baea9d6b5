"""Whole runs of a masked-diffusion policy: the loop, its callbacks and checkpoints are those of every other."""

import json

import pytest
import torch
from lightning.pytorch import Callback
from peft import LoraConfig

from lit_qrl.callbacks import AIS, MaskedIS, TruncatedIS
from lit_qrl.diffusion_policy import DiffusionPolicy
from lit_qrl.errors import ConfigError
from lit_qrl.network.folder import write_plain
from lit_qrl.objective import GRPO, GSPO
from lit_qrl.precision import QATAligned, UnifiedFP8
from lit_qrl.rollout import DiffusionEngine, TransformersEngine, VLLMEngine
from lit_qrl.run.event_log import SAMPLES_FILE, read_jsonl
from tests import tiny_run
from tests.networks import build_denoiser
from tests.tables import csv_rows


class Watch(Callback):
    """Keeps the masks and the log-probs of every update."""

    def __init__(self):
        self.seeds, self.sampler, self.old = [], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seeds.append(batch.batch.mask_seed.clone())
        self.sampler.append(batch.batch.sampler_logprobs.clone())
        old = batch.batch.learner_old_logprobs
        self.old.append(None if old is None else old.clone())


def fit(folder, **options):
    return tiny_run.fit(folder, **settings(options))


def settings(options):
    return {"kind": DiffusionPolicy, "network": build_denoiser, "engine": DiffusionEngine(block=4), **options}


def rows_of(trainer):
    return csv_rows(tiny_run.Path(trainer.default_root_dir) / "metrics.csv")


def test_a_run_in_fp8_with_ais_trains_and_says_its_mismatch(tmp_path, quick_plots):
    trainer, *_ = fit(tmp_path, callbacks=[AIS()], report=True)
    assert trainer.current_epoch == 2
    last = rows_of(trainer)[-1]
    assert 0 < float(last["mismatch/abs_log_ratio"]) < 0.5
    first = rows_of(trainer)[0]
    assert 0 < float(first["publish/probe_mean"]) < float(first["publish/probe_bound"])
    sample = read_jsonl(tiny_run.Path(trainer.default_root_dir) / SAMPLES_FILE)[0]
    assert len(sample["unmasked_at"]) == len(sample["token_lengths"])
    assert set(sample["unmasked_at"]) <= set(range(4))


def wide(**changes):
    return build_denoiser(**{**changes, "hidden_size": 128, "intermediate_size": 128, "head_dim": 32})


@pytest.mark.parametrize("plugin", [None, lambda: QATAligned("fp8_row"), lambda: UnifiedFP8(backend="emulate")])
def test_nothing_is_between_a_learner_and_its_own_arithmetic(tmp_path, plugin):
    plugins = {} if plugin is None else {"trainer": {"plugins": [plugin()]}}
    trainer, *_ = fit(tmp_path, format="auto", network=wide, **plugins)
    found = [float(row["mismatch/abs_log_ratio"]) for row in rows_of(trainer) if row.get("mismatch/abs_log_ratio")]
    assert len(found) == 2
    assert max(found) < 1e-5


def test_each_pass_has_masks_of_its_own_that_both_sides_share(tmp_path):
    watch = Watch()
    data = {"passes": 2, "mini_batches": 2}
    fit(tmp_path, callbacks=[watch, AIS()], data=data, format="bf16", trainer={"max_epochs": 1})
    first, second = torch.cat(watch.seeds[:2]), torch.cat(watch.seeds[2:])
    assert len(set(first.tolist()) | set(second.tolist())) == 32
    for sampler, old in zip(watch.sampler, watch.old, strict=True):
        assert (sampler - old).abs().max() < 0.2
    assert not torch.equal(watch.sampler[0], watch.sampler[2])


def test_masks_and_weights_repeat_after_a_resume_bit_for_bit(tmp_path):
    whole, parts = Watch(), Watch()
    _, module, _ = fit(tmp_path / "whole", callbacks=[whole, AIS()], trainer={"max_epochs": 3})
    fit(tmp_path / "part", callbacks=[Watch(), AIS()], trainer={"max_epochs": 1})
    last = tmp_path / "part" / "run" / "checkpoints" / "last.ckpt"
    trainer, again, data = tiny_run.build(
        tmp_path / "part", **settings({"callbacks": [parts, AIS()], "trainer": {"max_epochs": 3}})
    )
    trainer.fit(again, datamodule=data, ckpt_path=str(last), weights_only=True)
    for one, other in zip(whole.seeds[-2:], parts.seeds, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(tiny_run.parameters_of(module), tiny_run.parameters_of(again))
    assert not torch.equal(whole.seeds[0], whole.seeds[1])


@pytest.mark.parametrize("how", ["merged", "adapter"])
def test_an_adapter_and_a_reference(tmp_path, how):
    lora = LoraConfig(r=4, target_modules="all-linear")
    options = {"policy": {"lora": lora}, "objective": GRPO(kl_coefficient=0.04), "publisher": {"lora": how}}
    trainer, module, _ = fit(tmp_path, **options)
    row = [one for one in rows_of(trainer) if one.get("mismatch/abs_log_ratio")][-1]
    assert 0 < float(row["mismatch/abs_log_ratio"]) < 0.5
    assert module.policy.lora is lora


def test_what_is_exported_is_a_diffusion_policy_again(tmp_path):
    _, module, _ = fit(tmp_path, trainer={"max_epochs": 1})
    (tmp_path / "out").mkdir()
    write_plain(module.policy, tmp_path / "out", None, 2**30)
    again = DiffusionPolicy(str(tmp_path / "out"))
    again.configure()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["mask_token_id"] == again.config.mask_token_id
    for name, tensor in module.policy.network.state_dict().items():
        assert torch.equal(again.network.state_dict()[name], tensor)


BAD = [
    ({"engine": TransformersEngine()}, "TransformersEngine draws from left to right"),
    ({"engine": VLLMEngine()}, "VLLMEngine draws from left to right"),
    ({"engine": DiffusionEngine(block=3, steps=1)}, "max_completion_tokens is no multiple"),
    ({"policy": {"estimate": "blocks", "block": 2}}, "other blocks"),
    ({"objective": GSPO()}, "GSPO multiplies"),
    ({"callbacks": [TruncatedIS("sequence")]}, "TruncatedIS multiplies"),
    ({"callbacks": [MaskedIS("geometric")]}, "MaskedIS multiplies"),
    ({"callbacks": [AIS(level="sequence")]}, "AIS multiplies"),
    ({"data": {"evaluation_completion_tokens": 6}}, "an evaluation is no multiple"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_refused_before_weights_are_loaded(tmp_path, monkeypatch, options, message):
    monkeypatch.setattr(DiffusionPolicy, "configure", None)
    with pytest.raises(ConfigError, match=message) as error:
        fit(tmp_path, **options)
    assert error.value.remedy


def test_a_causal_policy_is_no_denoiser(tmp_path, monkeypatch):
    monkeypatch.setattr("lit_qrl.policy.CausalPolicy.configure", None)
    with pytest.raises(ConfigError, match=r"fills in masks.*DiffusionPolicy"):
        tiny_run.fit(tmp_path, engine=DiffusionEngine(block=4))
