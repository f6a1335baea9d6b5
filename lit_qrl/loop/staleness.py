"""How far the newest weights are from the older ones that drew a rollout: the mismatch's part that is staleness."""

from itertools import accumulate

import torch
from torch import Tensor

from lit_qrl.functional.mismatch import k3_divergence
from lit_qrl.loop.drafts import Draft
from lit_qrl.loop.hooks import Learner
from lit_qrl.rollout.engine import Scores

SCORED, FEW, TOKENS = 32, 2, 2**11
"""Sequences that show how far new weights are from those that drew them: so many at most, and these anyhow where they
have more tokens. The engine draws nothing meanwhile: 2**13 tokens of an 8B were a twelfth of a rollout of 32 × 512."""


@torch.no_grad()
def moved_since(learner: Learner, draft: Draft) -> Tensor | None:
    """Return how far the published weights are from the older ones that drew a rollout: Δ log p of some tokens.

    It is the part of the mismatch that comes of the schedule, both in the sampler's arithmetic; the rest is that of
    kernels, format and noise. None where the engine does not score, or log-probs are not at a temperature of 1.

    Args:
        learner: whose engine holds the new weights and draws nothing.
        draft: of the iteration under way, drawn by older ones.
    """
    data, engine = learner.data, learner.data.engine
    if not isinstance(engine, Scores) or data.temperature != 1.0 or data.sampling.truncated or not draft.completions:
        return None
    chosen = [(i, one) for i, one in enumerate(draft.completions[:SCORED]) if one.token_ids]
    prompts = [draft.problems[i // data.group_size].prompt_ids for i, _ in chosen]
    sequences = [[*prompt, *one.token_ids] for prompt, (_, one) in zip(prompts, chosen, strict=True)]
    within = sum(whole <= TOKENS for whole in accumulate(map(len, sequences)))
    chosen, sequences = chosen[: max(within, FEW)], sequences[: max(within, FEW)]
    scores = engine.score(sequences)
    new = torch.cat([row[-len(one.token_ids) :] for row, (_, one) in zip(scores, chosen, strict=True)])
    old = torch.tensor([value for _, one in chosen for value in one.logprobs])
    return new.float().cpu() - old


def note_staleness(learner: Learner, moved: Tensor | None) -> None:
    """Log what `moved_since` returned."""
    if moved is not None:
        learner.iteration.metrics.values("mismatch/staleness_abs", moved.abs())
        learner.iteration.metrics.values("mismatch/staleness_kl", k3_divergence(moved))
