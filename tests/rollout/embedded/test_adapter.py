import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

from lit_qrl.errors import ConfigError
from lit_qrl.network.adapters import base_weights, check_separable
from lit_qrl.precision.packed_lora import NVFP4LoRA
from lit_qrl.receipts.ledger import PublishError
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.engine import SamplerSpec
from lit_qrl.types import SamplingParams
from tests.networks import build_network
from tests.tables import csv_rows
from tests.tiny_run import fit

TOKENS = [[2, 5, 9, 3, 4], [7, 8]]
Q = "model.layers.0.self_attn.q_proj"


class Policy:
    def __init__(self, **options):
        self.lora = LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": "all-linear", **options})
        self.model = get_peft_model(build_network(), self.lora)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
        self.network = self.model.get_base_model()

    def tensors(self, **changes):
        return iter({**get_peft_model_state_dict(self.model), **changes}.items())

    @torch.no_grad()
    def scores(self, sequence):
        logits = self.network(input_ids=torch.tensor([sequence])).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]


def started(policy):
    engine = TransformersEngine()
    engine.setup(SamplerSpec(sampling=SamplingParams(max_tokens=4), adapter=policy.lora), policy)
    engine.load_weights(base_weights(policy.network), None, 0)
    return engine


@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 16, "down_proj": 1}}],
    ids=["plain", "rslora", "patterns"],
)
def test_base_and_adapter_side_by_side_are_peft_s_own_arithmetic(options):
    policy = Policy(**options)
    engine = started(policy)
    before = engine.score(TOKENS)
    report = engine.load_adapter(policy.tensors(), 3)
    for sequence, got, base in zip(TOKENS, engine.score(TOKENS), before, strict=True):
        expected = policy.scores(sequence)
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)
        assert (expected - base).abs().max() > 0.01
    assert engine.version == report.version == 3
    assert report.layers[f"base_model.model.{Q}.lora_A.weight"] == "float32"
    assert report.bytes == sum(t.numel() * 4 for _, t in policy.tensors())


def test_the_adapter_is_replaced_not_added_and_leaves_with_the_base():
    policy = Policy()
    engine = started(policy)
    base = engine.score(TOKENS)
    for version in (1, 2):
        engine.load_adapter(policy.tensors(), version)
    torch.testing.assert_close(engine.score(TOKENS)[0], policy.scores(TOKENS[0]), rtol=0, atol=2e-5)
    engine.load_weights(base_weights(policy.network), None, 3)
    assert torch.equal(engine.score(TOKENS)[0], base[0])


def test_what_does_not_fit_is_refused_and_the_old_adapter_stays():
    policy = Policy()
    engine = started(policy)
    engine.load_adapter(policy.tensors(), 1)
    before = engine.score(TOKENS)
    name = f"base_model.model.{Q}.lora_A.weight"
    lacking = ((n, t) for n, t in policy.tensors() if n != name)
    with pytest.raises(PublishError, match=f"missing: {name}"):
        engine.load_adapter(lacking, 2)
    with pytest.raises(ValueError, match=r"q_proj does not fit.*\(4, 5\)"):
        engine.load_adapter(policy.tensors(**{name: torch.zeros(4, 5)}), 2)
    embedding = "base_model.model.model.embed_tokens"
    foreign = {f"{embedding}.lora_{end}.weight": torch.zeros(2, 2) for end in "AB"}
    with pytest.raises(ValueError, match=r"no linear layer for .*embed_tokens"):
        engine.load_adapter(policy.tensors(**foreign), 2)
    with torch.no_grad():
        for _, tensor in policy.tensors():
            tensor.mul_(2)  # the engine has a copy
    assert torch.equal(engine.score(TOKENS)[0], before[0])
    assert engine.version == 1


@pytest.mark.parametrize(
    "options",
    [{"use_dora": True}, {"modules_to_save": ["embed_tokens"]}, {"bias": "lora_only"}],
    ids=lambda options: next(iter(options)),
)
def test_more_than_a_low_rank_term_is_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        check_separable(LoraConfig(**options))


@pytest.fixture(scope="module")
def without_adapter(tmp_path_factory):
    """How far a plain bf16 learner is from its sampler: 0 but on CPUs whose bf16 products depend on what is beside."""
    folder = tmp_path_factory.mktemp("plain")
    fit(folder, policy={"dtype": "bf16"}, format="bf16", trainer={"max_epochs": 1, "precision": "bf16-true"})
    return float(csv_rows(folder / "run" / "metrics.csv")[0]["mismatch/abs_log_ratio"])


@pytest.mark.parametrize("autocast", [None, "none", "bf16"])
def test_a_learner_in_bf16_with_factors_in_fp32_agrees_with_its_sampler(autocast, tmp_path, without_adapter):
    lora = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)
    plugins = {"plugins": [NVFP4LoRA(autocast=autocast)]} if autocast else {"precision": "bf16-true"}
    _, module, _ = fit(
        tmp_path,
        policy={"dtype": "bf16", "lora": lora},
        format="auto" if autocast else "bf16",
        publisher={"lora": "adapter"},
        lr=1e-2,
        trainer={"max_epochs": 3, **plugins},
    )
    factors = {p.dtype for name, p in module.policy.named_parameters() if "lora_" in name}
    assert factors == {torch.float32}
    rows = csv_rows(tmp_path / "run" / "metrics.csv")
    close = pytest.approx([0, 0, 0], abs=2 * without_adapter + 1e-5)
    assert [float(row["mismatch/abs_log_ratio"]) for row in rows] == close
