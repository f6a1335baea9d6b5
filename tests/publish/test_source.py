import pytest
from lightning.pytorch.plugins import Precision
from torch import nn

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.policy import CausalPolicy
from lit_qrl.precision import NVFP4LoRA, QATAligned, UnifiedFP8
from lit_qrl.precision.base import QuantizedPrecision
from lit_qrl.precision.source import WeightSource
from lit_qrl.publish.spec import source_of, trained_source
from tests.tiny_run import model_folder


@pytest.fixture
def policy(tmp_path):
    made = CausalPolicy(model_folder(tmp_path))
    made.configure()
    return made


def test_a_plugin_that_publishes_is_asked_and_no_other(policy):
    fp8 = formats.get("fp8_row")
    assert type(source_of(policy, Precision(), fp8)) is WeightSource
    assert source_of(policy, QATAligned("fp8_row"), fp8).aligned


def test_what_is_trained_is_asked_of_the_plugin(policy):
    """A contract of the base class: a plugin that says `trains_format` is evaluated in it, any other is not."""
    assert trained_source(policy, Precision()) is None
    assert trained_source(policy, NVFP4LoRA()) is None
    for plugin in (QATAligned("fp8_row"), UnifiedFP8("emulate")):
        source = trained_source(policy, plugin)
        assert (source.format, source.aligned) == (plugin.format, True)

    class Own(QuantizedPrecision):
        def source(self, policy, format, exclude=(), head=False):
            return WeightSource(policy, format, exclude, head)

    assert trained_source(policy, Own(formats.get("int8_channel"))).format == formats.get("int8_channel")


def test_a_format_that_fits_no_layer_is_refused_with_the_remedy(policy):
    for excluded, given in ((["*"], r"publisher\.exclude: \*"), ((), "a model without nn.Linear")):
        if not excluded:
            for name, module in list(policy.network.named_modules()):
                if isinstance(module, nn.Linear):
                    policy.network.set_submodule(name, nn.Identity())
        with pytest.raises(
            ConfigError, match=rf"No linear layer.*in fp8_row.*Given: {given}.*Correct publisher\.exclude"
        ):
            source_of(policy, None, formats.get("fp8_row"), excluded)
        assert source_of(policy, None, formats.get("bf16"), excluded).exclude == tuple(excluded)


def test_layers_that_do_not_fit_and_a_tied_head_are_refused(policy):
    with pytest.raises(ConfigError, match=r"do not fit int4_group.*publisher\.exclude"):
        source_of(policy, None, formats.get("int4_group"))
    with pytest.raises(ConfigError, match="would quantize the input embedding"):
        source_of(policy, None, formats.get("fp8_row"), head=True)
