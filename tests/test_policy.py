import json
import shutil

import peft
import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision

from lit_qrl.errors import ConfigError
from lit_qrl.network.padding_free import is_padding_free
from lit_qrl.network.structure import compute_frequencies_on_the_cpu
from lit_qrl.policy import CausalPolicy
from tests.networks import batch_of, build_network, build_tokenizer
from tests.tiny_run import configured


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    build_network().save_pretrained(path)
    build_tokenizer(pad_token="<pad>", eos_token="<eos>").save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=["auto", "never"])
def policy(folder, request):
    policy = configured(folder, packing=request.param)
    assert is_padding_free(policy.network) == (request.param == "auto")
    return policy


def test_a_16_bit_precision_casts_weights_and_leaves_frequencies_as_a_cpu_computes_them(folder):
    policy = configured(folder)
    rotary = policy.network.model.rotary_emb
    computed = rotary.inv_freq.clone()
    HalfPrecision("bf16-true").convert_module(policy)
    assert policy.network.model.norm.weight.dtype == torch.bfloat16
    assert rotary.inv_freq.dtype == torch.float32
    assert rotary.inv_freq.equal(computed)
    assert "inv_freq" not in "".join(policy.state_dict())
    with torch.no_grad():  # what a GPU's power may differ by
        rotary.inv_freq.copy_(torch.nextafter(computed, torch.tensor(2.0)))
    compute_frequencies_on_the_cpu(policy.network)
    assert rotary.inv_freq.equal(computed)


def test_no_attention_is_chosen_that_plans_for_each_shape(folder):
    torch.backends.cuda.enable_cudnn_sdp(True)
    CausalPolicy(str(folder)).configure()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def lora_policy(folder, **options):
    policy = CausalPolicy(str(folder), lora=peft.LoraConfig(**{**LORA, **options}))
    torch.manual_seed(1)
    policy.configure()
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return policy


PROMPTS = [[5, 6, 7, 8, 9], [4], [3, 3, 12]]
COMPLETIONS = [[4, 5, 1], [6, 7, 8, 9, 10, 11], [1]]


def alone(network, prompt, completion, temperature=1.0):
    """Each sequence by itself, without padding, through the library's own forward; log-softmax in fp64."""
    logits = network(torch.tensor([prompt + completion])).logits[0].double() / temperature
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, torch.tensor(completion)[:, None])[:, 0], entropy


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_match_each_sequence_alone(policy, temperature):
    scores = policy(batch_of(PROMPTS, COMPLETIONS), temperature, entropy=True)
    assert scores.logprobs.dtype == torch.float32
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        n = len(completion)
        expected, entropy = alone(policy.network, prompt, completion, temperature)
        torch.testing.assert_close(scores.logprobs[row, :n].double(), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(scores.entropy[row, :n].double(), entropy, atol=1e-5, rtol=1e-5)
        assert (scores.logprobs[row, n:] == 0).all()
        assert (scores.entropy[row, n:] == 0).all()


def test_gradient_matches_each_sequence_alone(policy):
    policy.zero_grad()
    (policy(batch_of(PROMPTS, COMPLETIONS)).logprobs.sum()).backward()
    got = {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}
    policy.zero_grad()
    sum(alone(policy.network, p, c)[0].sum() for p, c in zip(PROMPTS, COMPLETIONS, strict=True)).backward()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, atol=2e-4, rtol=2e-4)
    policy.zero_grad()


def test_a_batch_with_nothing_to_score_has_no_gradient(policy):
    batch = batch_of(PROMPTS, COMPLETIONS)
    batch.mask = torch.zeros_like(batch.mask)
    logprobs = policy(batch).logprobs
    logprobs.sum().backward()
    assert not logprobs.any()
    assert all(not parameter.grad.any() for parameter in policy.parameters() if parameter.grad is not None)
    policy.zero_grad()


def test_bf16_weights_give_fp32_log_probs_close_to_fp32(policy, folder):
    half = configured(folder, dtype="bf16")
    batch = batch_of(PROMPTS, COMPLETIONS)
    got, exact = half(batch).logprobs, policy(batch).logprobs
    assert next(half.network.parameters()).dtype == torch.bfloat16
    assert got.dtype == torch.float32
    assert 0 < (got - exact).abs().max() < 0.3


def test_tokenizer_loads_before_the_weights(folder):
    policy = CausalPolicy(str(folder))
    assert policy.encode("12+3=") == [3, 4, 12, 5, 18]
    assert policy.decode([3, 4, 12, 5, 1]) == "12+3"
    assert (policy.pad_token_id, policy.stop_token_ids) == (0, (1,))
    assert not list(policy.parameters())
    with pytest.raises(RuntimeError, match="configure"):
        _ = policy.network


def test_stop_tokens_include_the_generation_config(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert CausalPolicy(str(tmp_path)).stop_token_ids == (1, 7)


def test_without_a_generation_config_the_config_says_what_ends(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    config = {**json.loads((folder / "config.json").read_text()), "eos_token_id": [9, 7]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    policy = CausalPolicy(str(tmp_path))
    assert (policy.stop_token_ids, policy.pad_token_id) == ((1, 7, 9), 0)
    assert policy.ending == f"A completion ends with '<eos>' or {policy.decode([7])!r} or {policy.decode([9])!r}."
    (tmp_path / "generation_config.json").unlink()
    assert CausalPolicy(str(tmp_path)).stop_token_ids == (1, 7, 9)
    del config["eos_token_id"]  # whose default, in the config's class, is another model's
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert CausalPolicy(str(tmp_path)).stop_token_ids == (1,)


def test_configure_twice_keeps_the_weights(folder):
    policy = configured(folder)
    first = policy.model
    policy.configure()
    assert policy.model is first


def test_random_weights_need_no_checkpoint(folder, tmp_path):
    for file in folder.iterdir():
        if not file.name.endswith(".safetensors"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    policy = configured(tmp_path, random_weights=True, dtype="fp32")
    assert torch.isfinite(policy(batch_of(PROMPTS, COMPLETIONS)).logprobs).all()
    with pytest.raises(ConfigError, match="no weights"):
        CausalPolicy(str(tmp_path))


def test_gradient_checkpointing_gives_the_same_gradient(folder):
    grads = []
    for checkpointing in (False, True):
        policy = configured(folder, gradient_checkpointing=checkpointing)
        assert policy.training
        policy(batch_of(PROMPTS, COMPLETIONS)).logprobs.sum().backward()
        grads.append([parameter.grad for parameter in policy.parameters()])
    for left, right in zip(*grads, strict=True):
        torch.testing.assert_close(left, right)


# ------------------------------------------------------------------------------------------------------------ adapters


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    "options", [{}, {"use_dora": True}, {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}]
)
def test_merged_weights_are_what_the_adapted_policy_computes(folder, options):
    policy = lora_policy(folder, **options).eval()
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    plain = build_network(seed=5)
    names = set(dict(policy.named_weights()))
    missing, unexpected = plain.load_state_dict(dict(policy.named_weights()), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    assert len(names) == len(list(plain.named_parameters()))
    scores = policy(batch_of(PROMPTS, COMPLETIONS)).logprobs
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        expected, _ = alone(plain, prompt, completion)
        torch.testing.assert_close(scores[row, : len(completion)].double(), expected, atol=1e-5, rtol=1e-5)
    after = policy.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_only_the_adapter_trains_and_the_base_is_the_reference(folder, policy):
    adapted = lora_policy(folder)
    batch = batch_of(PROMPTS, COMPLETIONS)
    assert all("lora_" in name for name, parameter in adapted.named_parameters() if parameter.requires_grad)
    base = policy(batch).logprobs
    with adapted.reference():
        torch.testing.assert_close(adapted(batch).logprobs, base)
    assert (adapted(batch).logprobs - base).abs().max() > 1e-3
    assert all(name.endswith(("lora_A.weight", "lora_B.weight")) for name in adapted.adapter_tensors())
    assert len(adapted.adapter_tensors()) == 12


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    ("lora", "words"),
    [
        (peft.LoraConfig(r=2, target_modules=["lm_head"]), "output embedding"),
        (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "prompt-learning"),
    ],
)
def test_an_adapter_that_cannot_be_trained_is_refused(folder, lora, words):
    with pytest.raises(ConfigError, match=words):
        CausalPolicy(str(folder), lora=lora).configure()


def test_the_frozen_reference_stays_behind(folder):
    policy = configured(folder)
    batch = batch_of(PROMPTS, COMPLETIONS)
    with pytest.raises(RuntimeError, match="keep_reference"), policy.reference():
        pass
    keys = list(policy.state_dict())
    start = policy(batch).logprobs.detach()
    policy.keep_reference()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    assert (policy(batch).logprobs - start).abs().max() > 1e-3
    with policy.reference():
        assert torch.equal(policy(batch).logprobs, start)
    assert list(policy.state_dict()) == keys


@pytest.mark.parametrize("reference", ["own", "adapter", "other"])
def test_the_kl_over_the_vocabulary_is_that_of_both_models_logits(folder, tmp_path, reference):
    options = {"lora": peft.LoraConfig(**LORA)} if reference == "adapter" else {}
    if reference == "other":  # of another width
        build_network(hidden_size=48, head_dim=24).save_pretrained(tmp_path)
        CausalPolicy(str(folder)).tokenizer.save_pretrained(tmp_path)
        options["reference"] = str(tmp_path)
    policy = configured(folder, **options)
    keys = list(policy.state_dict())
    policy.keep_reference()
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    batch = batch_of(PROMPTS, COMPLETIONS)
    kl = policy(batch, 0.7, divergence=True).divergence
    gradient = torch.autograd.grad(kl.sum(), [p for p in policy.parameters() if p.requires_grad], allow_unused=True)
    assert any(one is not None and one.abs().sum() > 0 for one in gradient)
    assert list(policy.state_dict()) == keys
    model = policy.model if reference == "adapter" else policy.network
    with policy.reference():
        plain = model if reference == "adapter" else policy.frozen_copies[0].network
        other = [plain(row[None]).logits[0] for row in rows_of_tokens(batch)]
    own = [model(row[None]).logits[0] for row in rows_of_tokens(batch)]
    for row, (p, q) in enumerate(zip(own, other, strict=True)):
        p, q = ((one / 0.7).log_softmax(-1) for one in (p, q))
        wanted = (p.exp() * (p - q)).sum(-1)[batch.prompt_length[row] - 1 : -1]
        torch.testing.assert_close(kl[row][batch.mask[row]], wanted, rtol=1e-4, atol=1e-5)
    assert (kl[~batch.mask] == 0).all()


def rows_of_tokens(batch):
    """The sequences of a batch without their padding."""
    start = batch.tokens.shape[1] - batch.mask.shape[1] - batch.prompt_length
    return [
        tokens[int(s) : int(s) + int(n)] for tokens, s, n in zip(batch.tokens, start, batch.total_length, strict=True)
    ]


def test_a_reference_that_words_other_tokens_is_refused(folder, tmp_path):
    build_network().save_pretrained(tmp_path)
    tokenizer = CausalPolicy(str(folder)).tokenizer
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="another tokenizer"):
        CausalPolicy(str(folder), reference=str(tmp_path))


# ----------------------------------------------------------------------------------------------------------- bad input


def test_a_tokenizer_without_a_padding_token_pads_with_its_end_token(folder, tmp_path):
    build_tokenizer(eos_token="<eos>").save_pretrained(tmp_path)
    policy = CausalPolicy(str(folder), tokenizer=str(tmp_path))
    assert (policy.pad_token_id, policy.stop_token_ids) == (1, (1,))
    assert policy.ending == (
        "A completion ends with '<eos>'; '<eos>' pads too, as the tokenizer names no padding token."
    )
    assert CausalPolicy(str(folder), tokenizer=str(tmp_path), pad_token="<pad>").pad_token_id == 0
    with pytest.raises(ConfigError, match="vocabulary"):
        CausalPolicy(str(folder), tokenizer=str(tmp_path), pad_token="<nothing>")


def test_a_tokenizer_without_an_end_token_takes_the_models(folder, tmp_path):
    build_tokenizer(pad_token="<pad>").save_pretrained(tmp_path / "tokenizer")
    policy = CausalPolicy(str(folder), tokenizer=str(tmp_path / "tokenizer"))
    assert (policy.tokenizer.eos_token, policy.stop_token_ids) == ("<eos>", (1,))
    build_network(eos_token_id=None).save_pretrained(tmp_path / "endless")
    with pytest.raises(ConfigError, match=r"Neither the tokenizer .* has an end token.*model\.policy\.eos_token"):
        CausalPolicy(str(tmp_path / "endless"), tokenizer=str(tmp_path / "tokenizer"))


def test_missing_folders_and_files(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        CausalPolicy(str(tmp_path))
    with pytest.raises(ConfigError, match="tokenizer files"):
        CausalPolicy(str(folder), tokenizer=str(tmp_path))
    with pytest.raises(ConfigError, match="dtype"):
        CausalPolicy(str(folder), dtype="int8")


def test_an_incomplete_checkpoint(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    weights = {name: tensor for name, tensor in build_network().state_dict().items() if "layers.1.mlp" not in name}
    weights.pop("lm_head.weight")
    from safetensors.torch import save_file

    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    policy = CausalPolicy(str(tmp_path))
    with pytest.raises(ConfigError, match="lacks 3 weights"):
        policy.configure()


def test_chat_messages_need_a_template(policy, folder):
    messages = [{"role": "user", "content": "12"}]
    with pytest.raises(ConfigError, match=r"chat template.*data\.task\.chat: false.*--chat false"):
        policy.encode(messages)
    chatty = CausalPolicy(str(folder))
    chatty.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    assert chatty.encode(messages) == [3, 4, 18]


def test_an_end_token_that_the_tokenizer_appends_is_dropped(folder):
    from tokenizers.processors import TemplateProcessing

    policy = CausalPolicy(str(folder))
    policy.tokenizer.backend_tokenizer.post_processor = TemplateProcessing("$A <eos>", special_tokens=[("<eos>", 1)])
    assert policy.tokenizer("12")["input_ids"] == [3, 4, 1]
    assert policy.encode("12") == [3, 4]


def test_prompts_encoded_at_once_are_those_encoded_one_by_one(folder, monkeypatch):
    monkeypatch.setattr("lit_qrl.policy.AT_ONCE", 2)
    policy = CausalPolicy(str(folder))
    policy.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    prompts = ["12", [{"role": "user", "content": "3"}], "4+5=", "", [{"role": "user", "content": "67"}]]
    assert policy.encode_all(prompts) == [policy.encode(prompt) for prompt in prompts]
    assert policy.encode_all([]) == []
