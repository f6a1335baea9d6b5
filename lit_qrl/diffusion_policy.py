"""The policy of masked diffusion: a bidirectional model whose log-probs of a completion are estimated."""

from typing import Any, Literal

import torch
from peft import PeftConfig

from lit_qrl.errors import ConfigError
from lit_qrl.functional.logprobs import token_logprobs
from lit_qrl.network.denoising import Estimator, check_denoises, without_mask_token
from lit_qrl.network.head import output_head
from lit_qrl.policy import CausalPolicy, TokenScores
from lit_qrl.precision.layers.one_pass import Fuse
from lit_qrl.types import RolloutBatch


class DiffusionPolicy(CausalPolicy):
    """Holds a masked-diffusion model and its tokenizer; `DiffusionEngine` draws its completions.

    The model is a LLaDA checkpoint, which is read without its remote code, or any decoder of transformers whose
    `config.json` says `is_causal: false` and has a `mask_token_id`. Log-probs are estimates: a forward shows the
    prompt, some of its tokens masked, and a completion of masks (d1, arXiv:2504.12216). Sampler and learner compute
    them under the same masks.

    Args:
        model: name on the hub, or a folder.
        tokenizer: name or folder of the tokenizer; None takes the model's.
        dtype: of the weights; `auto` is fp32 on a CPU, else the checkpoint's own.
        lora: a PEFT config (`class_path: peft.LoraConfig`); None trains all weights.
        gradient_checkpointing: compute layers' activations again in the backward pass: in all, in none, or (`auto`) in
            those whose activations do not fit into the GPU's free memory; none on a CPU.
        attn_implementation: `sdpa`, `eager`, …; None is the library's choice.
        random_weights: build the model from its config alone, for benchmarks.
        pad_token: padding token instead of the tokenizer's, which pads with its end token where it names none.
        eos_token: end token instead of the tokenizer's, beside the model's own.
        chat_template_args: further arguments of the tokenizer's chat template.
        revision: branch, tag or commit on the hub.
        fuse: norms and gated activations in one kernel each: `auto` where there is CUDA and Triton.
        head_dtype: `fp32` computes logits, and their gradients, in fp32; `auto` in the dtype of the hidden states.
        dropout: train with the rates of the model's config and of `lora_dropout`.
        estimate: `one_step` scores all tokens in one forward, from a completion of masks; `blocks` takes a forward for
            each of the engine's blocks, with those before it shown.
        block: positions of a block, for `blocks`; the engine's own.
        masks: masks of the prompt that an estimate is the mean over; each takes its forwards.
        prompt_masking: probability that a token of the prompt is masked in an estimate.

    Raises:
        ConfigError: for a causal model, one without a mask token, or a number out of range.
    """

    denoises = True
    check_kind = staticmethod(check_denoises)

    def __init__(
        self,
        model: str,
        tokenizer: str | None = None,
        dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
        lora: PeftConfig | None = None,
        gradient_checkpointing: bool | Literal["auto"] = "auto",
        attn_implementation: str | None = None,
        random_weights: bool = False,
        pad_token: str | None = None,
        eos_token: str | None = None,
        chat_template_args: dict[str, Any] | None = None,
        revision: str | None = None,
        fuse: Fuse = "auto",
        head_dtype: Literal["auto", "fp32"] = "auto",
        dropout: bool = False,
        estimate: Literal["one_step", "blocks"] = "one_step",
        block: int = 32,
        masks: int = 1,
        prompt_masking: float = 0.15,
    ) -> None:
        ranges = (
            ("estimate", estimate in ("one_step", "blocks"), "one_step or blocks", estimate),
            ("block", block >= 1, "at least 1", block),
            ("masks", masks >= 1, "at least 1", masks),
            ("prompt_masking", 0 <= prompt_masking < 1, "a probability in [0, 1)", prompt_masking),
        )
        for name, good, expected, given in ranges:
            if not good:
                raise ConfigError(f"model.policy.{name} is out of range.", expected=expected, given=given)
        super().__init__(
            model,
            tokenizer=tokenizer,
            dtype=dtype,
            lora=lora,
            gradient_checkpointing=gradient_checkpointing,
            attn_implementation=attn_implementation,
            random_weights=random_weights,
            pad_token=pad_token,
            eos_token=eos_token,
            chat_template_args=chat_template_args,
            revision=revision,
            packing="never",  # rows laid end to end attend to what is before them
            fuse=fuse,
            head_dtype=head_dtype,
            dropout=dropout,
        )
        self.estimator = Estimator(kind=estimate, block=block, masks=masks, prompt_masking=prompt_masking)

    def _scores(self, network: Any, batch: RolloutBatch, temperature: float, *asked: bool) -> TokenScores:
        """Return estimates of the completion tokens' log-probs; an entropy is the mean over the masks."""
        entropy, entropy_gradient, *_ = asked
        options = output_head(network)
        options["bias"] = without_mask_token(options["bias"], options["weight"], network.config.mask_token_id)

        def head(hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            logprobs, entropies = token_logprobs(
                hidden,
                tokens=tokens,
                temperature=temperature,
                entropy=entropy,
                entropy_gradient=entropy_gradient,
                head_dtype=self.head_dtype,
                **options,
            )
            return torch.stack([logprobs] if entropies is None else [logprobs, entropies])

        figures = [torch.where(batch.mask, one, 0.0) for one in self.estimator(network, head, batch)]
        if not entropy:
            return TokenScores(figures[0], None)
        return TokenScores(figures[0], figures[1] if entropy_gradient else figures[1].detach())
