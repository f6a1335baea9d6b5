import torch

from tests.functional.helpers import rows
from tests.networks import rollout_of


def batch(dtype=torch.float64, **changes):
    """Return the learner's current log-probs and a batch whose learner_old is its neighbour."""
    learner_old, sampler, mask, advantages = rows(dtype, spread=0.2, huge=0.0)
    learner = torch.where(mask, learner_old, 0.0) + 0.1 * torch.randn(
        mask.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    ).to(dtype)
    fields = {"sampler_logprobs": sampler, "learner_old_logprobs": learner_old, "advantages": advantages}
    fields |= {"rewards": advantages + 0.5, "group": torch.arange(len(mask)) // 2}
    return learner.requires_grad_(), rollout_of(mask, **{**fields, **changes})


def value(objective, learner, data):
    terms = objective.terms(learner, data)
    return objective.loss(terms.loss, data, objective.total(objective.effective_mask(data), 6))
