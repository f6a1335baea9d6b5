"""What a step draws: a token for each masked position of the block, and how sure the model is of it."""

from typing import Any

import torch
from torch import Tensor

from lit_qrl.formats.kernels import dispatch
from lit_qrl.functional.diffusion import confidence, gumbel_argmax
from lit_qrl.functional.logprobs import CHUNK_ELEMENTS
from lit_qrl.network.head import SamplerHead
from lit_qrl.rollout.embedded.sampling import truncate
from lit_qrl.types import SamplingParams


class Drawer:
    """Draws tokens of one masked-diffusion model.

    Args:
        network: the model.
        sampling: temperature and truncation.
        block: positions of a block.
        head_dtype: that the output head computes in; None is its own.
    """

    def __init__(self, network: Any, sampling: SamplingParams, block: int, head_dtype: torch.dtype | None) -> None:
        self.head, self.sampling = SamplerHead.of(network, head_dtype), sampling
        embedding = network.get_output_embeddings()
        self.device = network.get_input_embeddings().weight.device
        self.mask_token: int = network.config.mask_token_id
        self.words, self.block = embedding.weight.shape[0], block
        limit = CHUNK_ELEMENTS.get(self.device.type, CHUNK_ELEMENTS["cpu"])
        self.share = max(1, limit // (block * self.words))
        self.temperature = torch.tensor(sampling.temperature, dtype=torch.float64, device=self.device)

    @property
    def greedy(self) -> bool:
        """Whether there is no noise."""
        return self.sampling.temperature == 0

    def memory(self, rows: int) -> Tensor | None:
        """Return where the noise of a step is written, "b block v"; None where it is drawn in parts, or not at all."""
        if self.greedy or rows > self.share:
            return None
        return torch.empty(rows, self.block, self.words, dtype=torch.float64, device=self.device)

    def draw(
        self, states: Tensor, masked: Tensor, uniform: Tensor | None, noise: list[torch.Generator]
    ) -> tuple[Tensor, Tensor]:
        """Return tokens and confidences "b block"; those of positions that are not masked mean nothing.

        Args:
            states: hidden states "b block h".
            masked: "b block".
            uniform: noise of the step in `memory`, already drawn; None draws what is needed.
            noise: generator of each row.
        """
        tokens, sure = [], []
        for begin in range(0, len(states), self.share):
            rows = slice(begin, begin + self.share)
            logits, given = self.head.logits(states[rows]), uniform
            if given is None and not self.greedy:
                given = torch.empty(logits.shape, dtype=torch.float64, device=self.device)
                fill(given, noise[rows])
            drawn, certainty = self._of(logits, given, masked[rows])
            tokens.append(drawn)
            sure.append(certainty)
        return torch.cat(tokens), torch.cat(sure)

    def _of(self, logits: Tensor, uniform: Tensor | None, masked: Tensor) -> tuple[Tensor, Tensor]:
        truncated = self.sampling.truncated and not self.greedy
        if dispatch.available(logits) and logits.is_contiguous() and not truncated:
            from lit_qrl.rollout.diffusion import fused_triton

            return fused_triton.draw(logits, uniform, masked.contiguous(), self.temperature, self.mask_token)
        logits = logits.float()
        logits.select(-1, self.mask_token).fill_(float("-inf"))
        allowed = logits
        if truncated:
            scores = (logits / self.sampling.temperature).flatten(0, 1)
            kept = truncate(scores, self.sampling.top_k, self.sampling.top_p).view_as(logits)
            allowed = logits.masked_fill(kept == float("-inf"), float("-inf"))
        chosen = gumbel_argmax(allowed, uniform, self.sampling.temperature)
        return chosen, confidence(logits, chosen)


def fill(uniform: Tensor, noise: list[torch.Generator]) -> None:
    """Draw noise "b block v" in place, of each row by its own generator."""
    for row, generator in enumerate(noise):
        torch.rand(uniform.shape[1:], generator=generator, out=uniform[row])
