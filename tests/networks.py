"""Tiny random models, a character tokenizer, and batches, for tests that need a real network."""

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

from lit_qrl.types import RolloutBatch

WORDS = ["<pad>", "<eos>", *"0123456789+-*/()=,:ab "]
SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "tie_word_embeddings": True,
}


def build_tokenizer(**special):
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def build_network(config_class=Qwen3Config, seed=0, dtype=torch.float32, *, gain=4, norm=0.2, bias=0.0, **changes):
    """Return a random network: matrices times `gain`, norms away from 1 by `norm`, biases from 0 by `bias`.

    Every test's network is made here: 4 makes the smallest one sure of its tokens; the other sizes are of
    `tests.vllm_engines`, whose kernels want more columns, and of `tests.precision.toy`, which trains.
    """
    torch.manual_seed(seed)
    config = config_class(**{**SIZES, **changes})
    network = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            width = norm if "norm" in name else bias if name.endswith(".bias") else 0
            if width:
                parameter.add_(width * torch.randn_like(parameter))
            elif "norm" not in name:
                parameter.mul_(gain)
    return network.eval()


def batch_of(prompts, completions):
    """Left-padded prompts, right-padded completions, as the records say."""
    width, t = max(map(len, prompts)), max(map(len, completions))
    b = len(prompts)
    tokens, mask = torch.zeros(b, width + t, dtype=torch.long), torch.zeros(b, t, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        tokens[row, width - len(prompt) : width] = torch.tensor(prompt)
        tokens[row, width : width + len(completion)] = torch.tensor(completion)
        mask[row, : len(completion)] = True
    return rollout_of(
        mask,
        tokens=tokens,
        prompt_length=torch.tensor([len(prompt) for prompt in prompts]),
        group=torch.arange(b),
        stopped=mask[:, -1],
    )


def rollout_of(mask, **fields):
    """A rollout of one group and version after prompts of one token, with zeros where no field is given."""
    b, t = mask.shape
    zeros, integers = torch.zeros(b), torch.zeros(b, dtype=torch.long)
    absent = {
        "tokens": torch.ones(b, 1 + t, dtype=torch.long),
        "prompt_length": torch.ones(b, dtype=torch.long),
        "sampler_logprobs": torch.zeros(b, t),
        "rewards": zeros,
        "advantages": zeros,
        "group": integers,
        "version": integers,
        "stopped": torch.ones(b, dtype=torch.bool),
    }
    return RolloutBatch(**{**absent, "mask": mask, **fields})


MASK = len(WORDS)
"""Id of the mask token of `build_denoiser`'s networks, for which the tokenizer has no word."""


def build_denoiser(**changes):
    """Return a random masked-diffusion network: a Llama that looks both ways."""
    options = {"vocab_size": len(WORDS) + 1, "is_causal": False, "mask_token_id": MASK, "gain": 2, **changes}
    return build_network(LlamaConfig, **options)
