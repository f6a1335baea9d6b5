"""What learner and sampler ask of a masked-diffusion model: its mask token, and estimates of log-probs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from lit_qrl.errors import ConfigError
from lit_qrl.functional.diffusion import masked_estimate
from lit_qrl.network import llada  # noqa: F401 - transformers knows LLaDA's checkpoints by it
from lit_qrl.network.structure import body
from lit_qrl.types import RolloutBatch

Head = Callable[[Tensor, Tensor], Tensor]
"""From hidden states "b n h" and tokens "b n" to figures "f b n" of the tokens, the log-probs first."""


def denoises(config: Any) -> bool:
    """Return whether a config is of a masked-diffusion model: attention is bidirectional, and there is a mask token.

    Args:
        config: of a Hugging Face model.
    """
    return getattr(config, "is_causal", True) is False and getattr(config, "mask_token_id", None) is not None


def is_denoiser(source: str) -> bool:
    """Return whether a folder or a model of the hub is a masked-diffusion model; one that cannot be read is none.

    Args:
        source: folder, or name on the hub.
    """
    try:
        return denoises(AutoConfig.from_pretrained(source))
    except (OSError, ValueError, KeyError):
        return False


def check_causal(config: Any) -> None:
    """Raise `ConfigError` for a masked-diffusion model.

    Args:
        config: of a Hugging Face model.
    """
    if denoises(config):
        raise ConfigError(
            "This model looks both ways and fills in masks, and a causal policy writes from left to right.",
            expected="a causal language model",
            given=f"model type {config.model_type} with is_causal: false",
            remedy="Set model.policy to DiffusionPolicy and data.engine to DiffusionEngine.",
        )


def check_denoises(config: Any) -> None:
    """Raise `ConfigError` for a model that fills in no masks.

    Args:
        config: of a Hugging Face model.
    """
    if getattr(config, "is_causal", True):
        raise ConfigError(
            "This model is causal, and a masked-diffusion policy looks both ways.",
            expected="a config.json of model type llada, or one with is_causal: false and a mask_token_id",
            given=f"model type {config.model_type}",
            remedy="Set model.policy to CausalPolicy, or take a masked-diffusion model.",
        )
    mask, size = getattr(config, "mask_token_id", None), config.vocab_size
    if mask is None or not 0 <= mask < size:
        raise ConfigError(
            "This model has no mask token.",
            expected=f"a mask_token_id from 0 to {size - 1} in its config.json (126336 for LLaDA-8B)",
            given=mask,
            remedy="Add it to config.json.",
        )


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """How a completion's log-probs are estimated; sampler and learner have the same.

    Args:
        kind: `one_step` shows a completion of masks; `blocks` shows the blocks before the one that is scored.
        block: positions of a block, for `blocks`.
        masks: masks of the prompt that are averaged over.
        prompt_masking: probability that a token of the prompt is masked.
    """

    kind: Literal["one_step", "blocks"] = "one_step"
    block: int = 32
    masks: int = 1
    prompt_masking: float = 0.15

    def hidden(self, seeds: Sequence[int], lengths: Sequence[int], width: int) -> Tensor:
        """Return which tokens of the prompts are masked, "m b width", the prompts at the right end.

        A row depends on its seed and its prompt's length alone, not on the batch that it is in.

        Args:
            seeds: of each row.
            lengths: of each row's prompt.
            width: of the widest.

        >>> Estimator(prompt_masking=0.5).hidden([3], [2], 4)[0, 0, :2].any().item()
        False
        """
        hidden = torch.zeros(self.masks, len(seeds), width, dtype=torch.bool)
        if self.prompt_masking:
            for row, (seed, length) in enumerate(zip(seeds, lengths, strict=True)):
                generator = torch.Generator().manual_seed(seed)
                # In fp32 on both sides: under bf16-true the default dtype is bf16 in the learner's passes alone.
                uniform = torch.rand(self.masks, length, generator=generator, dtype=torch.float32)
                hidden[:, row, width - length :] = uniform < self.prompt_masking
        return hidden

    def __call__(self, network: Any, head: Head, batch: RolloutBatch) -> Tensor:
        """Return figures "f b t" of a batch's completion tokens, the log-probs first.

        Args:
            network: the masked-diffusion model.
            head: from its hidden states to the figures.
            batch: with the seeds of its masks and the lengths that its completions were drawn over.

        Raises:
            ValueError: when the batch has no seeds, as one of a causal sampler.
        """
        if batch.mask_seed is None or batch.drawn_over is None:
            raise ValueError(
                "A completion has no seed of its masks. Expected: one from DiffusionEngine. Given: none. "
                "Set data.engine to DiffusionEngine."
            )
        t, device = batch.mask.shape[1], batch.tokens.device
        width = batch.tokens.shape[1] - t
        lengths, over = batch.prompt_length.tolist(), batch.drawn_over.tolist()
        length = max(max(over), t)
        hidden = self.hidden(batch.mask_seed.tolist(), lengths, width).to(device)
        layout = Layout.of(lengths, over, width, length, device)

        def score(canvas: Tensor, part: slice) -> Tensor:
            states = layout.states(network, canvas)[:, width + part.start : width + part.stop]
            return head(states, batch.tokens[:, width + part.start : width + part.stop])

        block = self.block if self.kind == "blocks" else None
        prompt, completion = batch.tokens[:, :width], batch.tokens[:, width:]
        return masked_estimate(score, prompt, completion, length, hidden, network.config.mask_token_id, block)


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a batch's rows are: prompts at the right end of theirs, completions at the left.

    Args:
        positions: "b s", of each column in its sequence.
        valid: "b s", False where nothing stands; None where no column is empty.
    """

    positions: Tensor
    valid: Tensor | None

    @classmethod
    def of(
        cls, prompts: Sequence[int], completions: Sequence[int], width: int, length: int, device: torch.device
    ) -> "Layout":
        """Return the layout of rows of so many tokens, in `width` columns of prompts and `length` of completions."""
        columns = torch.arange(width + length)
        first = width - torch.tensor(prompts)[:, None]
        last = width + torch.tensor(completions)[:, None]
        valid = (columns >= first) & (columns < last)
        positions = (columns - first).clamp(min=0)
        return cls(positions.to(device), None if bool(valid.all()) else valid.to(device))

    def rows(self, chosen: Tensor) -> "Layout":
        """Return the layout of some rows."""
        return Layout(self.positions[chosen], None if self.valid is None else self.valid[chosen])

    def states(self, network: Any, canvas: Tensor, at: Tensor | None = None, **options: Any) -> Tensor:
        """Return the last hidden states "b n h" of a canvas, or of some columns of it.

        Args:
            network: the model.
            canvas: "b n", token ids.
            at: " n", columns of the tokens; None for all of them.
            **options: for the model, such as a cache that holds the columns it does not begin with.
        """
        mask = self.valid
        if mask is not None:
            # The library looks at a flat mask on the host, which would wait for the device at each forward.
            takes_bool = ALL_MASK_ATTENTION_FUNCTIONS.get(network.config._attn_implementation) is sdpa_mask
            mask = mask[:, None, None, :] if takes_bool else mask.long()
        positions = self.positions if at is None else self.positions.index_select(1, at)
        if mask is None and at is None:
            positions = None  # 0, 1, 2, …; of given ones the library asks the device whether sequences are packed
        options = {"use_cache": False, **options}
        forward = body(network)
        return forward(input_ids=canvas, attention_mask=mask, position_ids=positions, **options).last_hidden_state


def without_mask_token(bias: Tensor | None, like: Tensor, mask_token: int) -> Tensor:
    """Return a bias " v" of the output head under which the mask token is never drawn: it is no word.

    Args:
        bias: of the head, or None.
        like: the head's weight "v h".
        mask_token: id of the mask token.

    >>> without_mask_token(None, torch.zeros(3, 2), 1)
    tensor([0., -inf, 0.])
    """
    bias = like.new_zeros(len(like)) if bias is None else bias.clone()
    return bias.index_fill(0, torch.tensor([mask_token], device=bias.device), float("-inf"))
