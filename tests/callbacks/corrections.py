"""A mini-batch for the corrections' tests."""

from types import SimpleNamespace

import torch

from lit_qrl.functional.importance import log_ratio
from lit_qrl.types import LossContext, RolloutBatch, no_all_reduce
from tests.functional.helpers import rows


def context(dtype=torch.float64, all_reduce=no_all_reduce, part=slice(None), equal=False, **options):
    learner, sampler, mask, advantages = (x[part] for x in rows(dtype, **options))
    if equal:
        learner = sampler
    return LossContext(
        learner_old=learner,
        sampler=sampler,
        log_ratio=log_ratio(learner, sampler, mask),
        mask=mask,
        advantages=advantages,
        version=torch.zeros(len(mask), dtype=torch.long),
        all_reduce=all_reduce,
    )


def rollout(given):
    """Return the rollout batch that a context was cut from."""
    b, t = given.mask.shape
    return RolloutBatch(
        tokens=torch.ones(b, 1 + t, dtype=torch.long),
        prompt_length=torch.ones(b, dtype=torch.long),
        mask=given.mask,
        sampler_logprobs=given.sampler,
        learner_old_logprobs=given.learner_old,
        rewards=given.advantages,
        advantages=given.advantages,
        group=torch.zeros(b, dtype=torch.long),
        version=given.version,
        stopped=torch.ones(b, dtype=torch.bool),
    )


def trainer():
    """Return what a callback needs of a trainer of one process."""
    return SimpleNamespace(world_size=1)
