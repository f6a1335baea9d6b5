"""The policy of masked diffusion: a bidirectional model whose log-probs of a completion are estimated."""

from typing import Any, Literal

import torch

from lit_qrl.errors import ConfigError
from lit_qrl.functional.logprobs import token_logprobs
from lit_qrl.network.denoising import Estimator, check_denoises, without_mask_token
from lit_qrl.network.head import output_head
from lit_qrl.policy import CausalPolicy, TokenScores
from lit_qrl.types import RolloutBatch


class DiffusionPolicy(CausalPolicy):
    """Holds a masked-diffusion model and its tokenizer; `DiffusionEngine` draws its completions.

    The model is a LLaDA checkpoint, which is read without its remote code, or any decoder of transformers whose
    `config.json` says `is_causal: false` and has a `mask_token_id`. Log-probs are estimates: a forward shows the
    prompt, some of its tokens masked, and a completion of masks (d1, arXiv:2504.12216). Sampler and learner compute
    them under the same masks.

    Args:
        estimate: `one_step` scores all tokens in one forward, from a completion of masks; `blocks` takes a forward for
            each of the engine's blocks, with those before it shown.
        block: positions of a block, for `blocks`; the engine's own.
        masks: masks of the prompt that an estimate is the mean over; each takes its forwards.
        prompt_masking: probability that a token of the prompt is masked in an estimate.
        **kwargs: see `CausalPolicy`; without `packing`, `compile`, `trust_remote_code` and `reference`.

    Raises:
        ConfigError: for a causal model, one without a mask token, or a number out of range.
    """

    denoises = True
    check_kind = staticmethod(check_denoises)

    def __init__(
        self,
        model: str,
        estimate: Literal["one_step", "blocks"] = "one_step",
        block: int = 32,
        masks: int = 1,
        prompt_masking: float = 0.15,
        **kwargs,
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
            packing="never",  # rows laid end to end attend to what is before them
            trust_remote_code=False,
            compile=False,
            reference=None,
            **kwargs,
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
