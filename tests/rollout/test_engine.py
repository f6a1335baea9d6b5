"""The contract of an engine, and that those which ship keep to its signatures."""

import inspect

import pytest
import torch

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.engine import EngineDiedError, RolloutEngine
from lit_qrl.rollout.vllm.engine import VLLMEngine

METHODS = sorted(name for name, value in vars(RolloutEngine).items() if inspect.isfunction(value))


class Smallest(RolloutEngine):
    def setup(self, policy, tokenizer, sampling):
        return None

    def generate(self, prompts, n, seed, progress=None, sampling=None):
        return []

    def load_weights(self, tensors, format, version):
        return None

    def score(self, sequences):
        return []


@pytest.mark.parametrize("engine", [TransformersEngine, VLLMEngine])
@pytest.mark.parametrize("name", METHODS)
def test_engines_take_what_the_contract_says(engine, name):
    contract, own = (inspect.signature(getattr(cls, name)).parameters for cls in (RolloutEngine, engine))
    assert list(own)[: len(contract)] == list(contract)
    for parameter in own.values():
        if parameter.name not in contract:
            assert parameter.default is not inspect.Parameter.empty, f"{name} wants {parameter.name}"
        else:
            assert (parameter.default is inspect.Parameter.empty) == (
                contract[parameter.name].default is inspect.Parameter.empty
            )


def test_what_an_engine_must_write_itself():
    assert RolloutEngine.__abstractmethods__ == {"setup", "generate", "load_weights", "score"}
    with pytest.raises(TypeError, match="abstract"):
        RolloutEngine()


def test_an_engine_without_extras_refuses_them_with_the_remedy():
    engine = Smallest()
    with pytest.raises(NotImplementedError, match=r"Smallest cannot load adapters.*merged"):
        engine.load_adapter(iter([("a", torch.ones(1))]), 0)
    with pytest.raises(NotImplementedError, match="Smallest cannot replace norms"):
        engine.perturb(iter([]), 0)
    with pytest.raises(ConfigError, match=r"Smallest keeps no weights.*share_weights to false"):
        engine.check_sharing(formats.get("nvfp4"))
    assert engine.read_back("x") is engine.read_columns("x", [0]) is engine.stored_weight("x") is None
    assert engine.holds_weights
    assert engine.version == -1  # before the first publish


def test_a_death_is_no_mistake_of_the_configuration():
    assert not issubclass(EngineDiedError, ValueError)
    assert issubclass(EngineDiedError, RuntimeError)
