"""The contract of an engine: that those which ship keep to its signatures, and that nothing beyond it is needed."""

import copy
import inspect

import pytest
import torch

from lit_qrl.receipts.ledger import PublishReport
from lit_qrl.rollout import engine as contract
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.engine import EngineDiedError, RolloutEngine, SamplerSpec
from lit_qrl.rollout.vllm.engine import VLLMEngine
from lit_qrl.run.event_log import read_jsonl
from lit_qrl.types import Completion
from tests.tiny_run import build

PROTOCOLS = ["TakesAdapter", "Scores", "LendsWeights"]
KINDS = [getattr(contract, name) for name in PROTOCOLS]
METHODS = [
    (kind, name)
    for kind in (RolloutEngine, *KINDS)
    for cls in kind.__mro__
    for name, value in vars(cls).items()
    if inspect.isfunction(value) and not name.startswith("_")
]


class Smallest(RolloutEngine):
    """Nothing but what the contract asks for: a copy of the network, one forward pass per token."""

    def setup(self, spec, policy):
        self.spec, self.network = spec, copy.deepcopy(policy.network)

    def load_weights(self, tensors, format, version):
        missing, unexpected = self.network.load_state_dict(dict(tensors), strict=False)
        assert (missing, unexpected) == (["lm_head.weight"], [])  # tied
        self.version = version
        return PublishReport(version=version, seconds=0.0, bytes=0, layers={})

    @torch.no_grad()
    def generate(self, prompts, n, seed, progress=None, sampling=None):
        sampling, generator = sampling or self.spec.sampling, torch.Generator().manual_seed(seed)
        drawn = []
        for prompt in (prompt for prompt in prompts for _ in range(n)):
            tokens, logprobs = list(prompt), []
            for _ in range(sampling.max_tokens):
                scores = self.network(torch.tensor([tokens])).logits[0, -1].log_softmax(0)
                token = int(torch.multinomial(scores.exp(), 1, generator=generator))
                tokens.append(token)
                logprobs.append(float(scores[token]))
            completion = tokens[len(prompt) :]
            drawn.append(
                Completion(token_ids=completion, logprobs=logprobs, finish_reason="length", version=self.version)
            )
        return drawn


@pytest.mark.parametrize("engine", [TransformersEngine, VLLMEngine])
@pytest.mark.parametrize(("kind", "name"), METHODS, ids=lambda value: getattr(value, "__name__", value))
def test_engines_take_what_the_contract_says(engine, kind, name):
    if not hasattr(engine, name):
        assert kind is not RolloutEngine
        return
    asked, own = (inspect.signature(getattr(cls, name)).parameters for cls in (kind, engine))
    assert list(own)[: len(asked)] == list(asked)
    for parameter in own.values():
        if parameter.name not in asked:
            assert parameter.default is not inspect.Parameter.empty, f"{name} wants {parameter.name}"
        else:
            assert (parameter.default is inspect.Parameter.empty) == (
                asked[parameter.name].default is inspect.Parameter.empty
            )


@pytest.mark.parametrize(
    ("engine", "expected"),
    [(Smallest(), []), (TransformersEngine(), ["TakesAdapter", "Scores"]), (VLLMEngine(), PROTOCOLS)],
    ids=lambda value: type(value).__name__,
)
def test_what_an_engine_can_do_beyond_that_shows_in_its_methods(engine, expected):
    assert [name for name, kind in zip(PROTOCOLS, KINDS, strict=True) if isinstance(engine, kind)] == expected


def test_the_smallest_engine_runs(tmp_path):
    """Publishes, rollouts and evaluations, for a learner that is the sampler: no ratio moves away from 1."""
    trainer, module, data = build(
        tmp_path, format="auto", data={"max_completion_tokens": 4}, trainer={"max_epochs": 2, "limit_val_batches": 1}
    )
    data.engine = Smallest()
    rows = []
    trainer.callbacks[0].on_train_epoch_end = lambda trainer, module: rows.append(dict(module.iteration.row))
    trainer.fit(module, datamodule=data)
    assert data.engine.version == 1
    assert data.engine.spec == SamplerSpec(
        sampling=data.sampling,
        prompt_limit=16,
        evaluation_limits=(4,),
        decode_steps=2 * 4,
        on_hang=data.engine.spec.on_hang,
    )
    assert len(rows) == 2
    assert all(row["mismatch/abs_log_ratio"] < 1e-5 for row in rows)
    assert [event["kind"] for event in read_jsonl(tmp_path / "run" / "events.jsonl")] == ["update", "sampler"]


def test_a_death_is_no_mistake_of_the_configuration():
    assert not issubclass(EngineDiedError, ValueError)
    assert issubclass(EngineDiedError, RuntimeError)
