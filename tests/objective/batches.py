import torch

from lit_qrl.types import RolloutBatch
from tests.functional.helpers import rows


def batch(dtype=torch.float64, **changes):
    """Return the learner's current log-probs and a batch whose learner_old is its neighbour."""
    learner_old, sampler, mask, advantages = rows(dtype, spread=0.2, huge=0.0)
    learner = torch.where(mask, learner_old, 0.0) + 0.1 * torch.randn(
        mask.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    ).to(dtype)
    b = len(mask)
    fields = {
        "tokens": torch.ones(b, 2 + mask.shape[1], dtype=torch.long),
        "prompt_length": torch.full((b,), 2),
        "mask": mask,
        "sampler_logprobs": sampler,
        "learner_old_logprobs": learner_old,
        "rewards": advantages + 0.5,
        "advantages": advantages,
        "group": torch.arange(b) // 2,
        "version": torch.zeros(b, dtype=torch.long),
        "stopped": torch.ones(b, dtype=torch.bool),
    }
    return learner.requires_grad_(), RolloutBatch(**{**fields, **changes})


def value(objective, learner, data):
    terms = objective.terms(learner, data)
    return objective.loss(terms.loss, data, objective.total(objective.effective_mask(data), 6))
