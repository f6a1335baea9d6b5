"""A mini-batch for the corrections' tests."""

from types import SimpleNamespace

import torch

from lit_qrl.functional.importance import log_ratio
from lit_qrl.types import LossContext, no_all_reduce
from tests.functional.helpers import rows
from tests.networks import rollout_of


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
    return rollout_of(
        given.mask,
        sampler_logprobs=given.sampler,
        learner_old_logprobs=given.learner_old,
        rewards=given.advantages,
        advantages=given.advantages,
        version=given.version,
    )


def trainer():
    """Return what a callback needs of a trainer of one process."""
    return SimpleNamespace(world_size=1)
