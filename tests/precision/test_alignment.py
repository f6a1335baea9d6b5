import pytest
from lightning.pytorch import Callback

from lit_qrl import formats as f
from lit_qrl.errors import ConfigError
from lit_qrl.functional.importance import log_ratio
from lit_qrl.precision import QATAligned, UnifiedFP8
from tests import tiny_run as run

SIZES = {"max_completion_tokens": 24, "prompts_per_iteration": 4}


class LogRatios(Callback):
    def __init__(self):
        self.means = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        rollout = module.iteration.rollout
        d = log_ratio(rollout.learner_old_logprobs, rollout.sampler_logprobs, rollout.mask)
        self.means.append(float(d.abs().sum() / rollout.mask.sum()))


def mismatch(folder, format, plugin, **options):
    seen = LogRatios()
    # two updates per rollout, so that learner_old comes from a scoring pass of its own
    chosen = {"plugins": [plugin]} if plugin else {}
    data = {**SIZES, "mini_batches": 2}
    run.fit(folder, callbacks=[seen], format=format, trainer=chosen, data=data, lr=1e-3, **options)
    assert len(seen.means) == 4
    return sum(seen.means) / len(seen.means)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return mismatch(tmp_path_factory.mktemp("plain"), "fp32", None)


@pytest.mark.parametrize("format", [f.Int4Group(32), f.NVFP4(), f.MXFP4(), f.NF4()], ids=lambda format: format.name)
def test_weight_only_formats_agree_as_well_as_plain_weights(tmp_path, plain, format):
    aligned = mismatch(tmp_path, "auto", QATAligned(format))
    assert plain < 1e-5
    assert aligned <= 1.1 * plain + 1e-7


@pytest.mark.parametrize(
    "format", [f.FP8Tensor("token"), f.FP8Row(), f.FP8Block(), f.Int8Channel(), f.Int4Group(32, "fp8")], ids=str
)
def test_formats_that_quantize_activations_agree_four_times_better_than_unaligned(tmp_path, format):
    unaligned = mismatch(tmp_path / "unaligned", format, None)
    aligned = mismatch(tmp_path / "aligned", "auto", QATAligned(format))
    assert unaligned > 1e-3
    assert aligned <= unaligned / 4


def test_the_unified_flow_agrees_with_its_sampler(tmp_path):
    unaligned = mismatch(tmp_path / "unaligned", "fp8_block", None)
    assert mismatch(tmp_path / "aligned", "auto", UnifiedFP8("emulate")) <= unaligned / 4


def test_another_sampler_format_is_refused_unless_asked_for(tmp_path):
    with pytest.raises(ConfigError, match="differs from the one that the learner computes in"):
        mismatch(tmp_path, "int4_group", QATAligned("fp8_row"))
    mixed = mismatch(tmp_path / "b", f.Int4Group(32), QATAligned("fp8_row"), publisher={"unaligned": True})
    assert mixed > 1e-3
