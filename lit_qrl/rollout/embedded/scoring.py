"""The sampler's log-probs of given sequences."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lit_qrl.network.head import SamplerHead
from lit_qrl.network.invariant import batch_invariant
from lit_qrl.network.structure import body, cached
from lit_qrl.rollout.embedded.cache_scales import Rounding, ScoringCache
from lit_qrl.rollout.embedded.shortage import freed

SCORE_TOKENS = 2**14
"""Padded tokens of one scoring forward."""


@torch.no_grad()
def scores_of(
    network: Any, head: SamplerHead, sequences: Sequence[Sequence[int]], invariant: bool, rounding: Rounding | None
) -> list[Tensor]:
    """Return the log-probs (fp32, T = 1, "length − 1") of each sequence's tokens after the first.

    Where memory runs out, fewer sequences are computed at once.

    Args:
        network: the sampler's Hugging Face model.
        head: of it.
        sequences: token ids.
        invariant: every token is computed alike in every batch.
        rounding: of keys and values; None takes them as they are.
    """
    device = network.get_input_embeddings().weight.device
    scores: list[Tensor] = [torch.empty(0)] * len(sequences)
    order = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
    room = SCORE_TOKENS
    while order:
        width = len(sequences[order[0]])
        share, rest = order[: max(1, room // width)], order[max(1, room // width) :]
        tokens = torch.zeros(len(share), width, dtype=torch.long)
        for row, index in enumerate(share):
            tokens[row, : len(sequences[index])] = torch.tensor(sequences[index])
        try:
            tokens = tokens.to(device)
            cache = None if rounding is None else ScoringCache(rounding)
            with batch_invariant(invariant):
                states = body(network)(input_ids=tokens, **cached(network, cache))
                logprobs = head.logprobs(states.last_hidden_state[:, :-1], tokens[:, 1:])
        except (RuntimeError, MemoryError) as error:
            freed(error, len(share), "scored")
            room = len(share) // 2 * width
            continue
        order = rest
        for row, index in enumerate(share):
            scores[index] = logprobs[row, : len(sequences[index]) - 1].clone()
    return scores
