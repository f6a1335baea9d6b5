"""One iteration of reinforcement learning from verifiable rewards, in the order of the papers.

========= =================================================================================== ==================
step      what happens                                                                        function
========= =================================================================================== ==================
roll out  x ~ D, y ~ π_sampler(· | x): G completions of each prompt, and their rewards R       `roll_out`
score     log π_learner_old(y | x), by the learner's own arithmetic; π_reference for a KL      `score`
          A = R − mean of its group (GRPO divides by the standard deviation)                  `score`
correct   w, keep = f(log π_learner_old − log π_sampler), once per mini-batch (AIS, TIS, …)    `correct`
deal      each mini-batch is one optimizer step, cut into micro-batches that pad little       `deal`
========= =================================================================================== ==================

The weights were published before the first of these. `deal` calls `correct` (`loop.correction`); what the objective
makes of w, keep and A is the module's `training_step`. With one update per rollout its forward pass is learner_old's:
`scored_when` says whether that is scored before, for what all of the batch decides, or corrected there (`weigh_here`).
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

import torch

from lit_qrl.functional.advantage import differing
from lit_qrl.loop.batching import assemble, concatenate, rows_of
from lit_qrl.loop.contracts import Learner, PendingRollout, Problem, widest
from lit_qrl.loop.correction import ScoredWhen, correct, scored_when
from lit_qrl.loop.generation import draw, drawn, tell_episodes, together
from lit_qrl.loop.hooks import rl_callbacks
from lit_qrl.loop.routing import scored_routes
from lit_qrl.loop.turns import TakesTurns
from lit_qrl.network.padding_free import laid_out
from lit_qrl.rewards.streaming import StreamingRewards
from lit_qrl.rollout.engine import Estimates
from lit_qrl.seeding import derive_seed
from lit_qrl.types import Completion, MicroBatch, RolloutBatch


def iterate(learner: Learner) -> Iterator[MicroBatch]:
    """Yield the micro-batches of one iteration; nothing runs before the first is asked for."""
    state, trainer = learner.iteration, learner.trainer
    with state.timed("rollout"):
        passes = masked_anew(learner, roll_out(learner))
        drawn(learner)
    with state.timed("score"):
        passes = [score(learner, rollout.to(learner.device)) for rollout in passes]
    state.rollout = passes[0]
    for callback in rl_callbacks(trainer):
        callback.on_rollout_end(trainer, learner, passes[0])
    yield from deal(learner, passes)


def roll_out(learner: Learner) -> RolloutBatch:
    """Return the completions of this rank's slots, in their order, with rewards.

    Where the objective asks for it (DAPO's dynamic sampling), slots whose group has no variance are filled again by the
    next prompts of the stream, in rounds that all ranks take together; the last round's groups stay as they are.
    """
    data, objective, slots = learner.data, learner.objective, learner.data.slots
    parts: list[RolloutBatch] = []
    filled: dict[int, Problem] = {}
    rounds = 1 + (objective.max_resample if objective.filter_zero_variance else 0)
    data.schedule.rollout_begins(data.position)
    for attempt in range(rounds):
        open_slots = list(range(slots.groups))
        if attempt:
            open_slots = slots.lacking(list(filled), learner.reduce, learner.device)
        if not open_slots:
            break
        numbers = [number for number, slot in enumerate(open_slots) if slot % slots.width in slots.columns]
        pending = data.schedule.take(learner, len(open_slots), numbers)
        drawn_now = together(learner, partial(_draw_groups, learner, pending, attempt, numbers))
        if drawn_now is None:  # the others' slots alone are open
            continue
        kept = list(range(len(pending.problems)))
        varied = differing(drawn_now.rewards.view(-1, data.group_size))
        if data.group_size > 1:
            learner.iteration.metrics.values("rollout/zero_variance_groups", (~varied).float())
        if objective.filter_zero_variance and attempt < rounds - 1 and not bool(varied.all()):
            kept = varied.nonzero().flatten().tolist()
            drawn_now = drawn_now.select(rows_of(kept, data.group_size), trim=False)
        parts.append(drawn_now)
        filled |= {open_slots[numbers[group]]: pending.problems[group] for group in kept}
    learner.iteration.problems = [filled[slot] for slot in sorted(filled)]
    return _in_order(learner, parts, list(filled))


def _in_order(learner: Learner, parts: list[RolloutBatch], found: list[int]) -> RolloutBatch:
    """Return one batch of all groups by their slots, as wide as that of any rank: what is drawn by position agrees."""
    g, pad = learner.data.group_size, learner.policy.pad_token_id
    longest = widest(max(part.mask.shape[1] for part in parts), learner.reduce, learner.device)
    rollout = concatenate(parts, pad, g, longest)
    order = sorted(range(len(found)), key=found.__getitem__)
    if order == list(range(len(found))):
        return rollout
    return replace(rollout.select(rows_of(order, g), trim=False), group=rollout.group)


def _draw_groups(
    learner: Learner, pending: PendingRollout, attempt: int, numbers: Sequence[int]
) -> RolloutBatch | None:
    """Return G completions of each problem, with their rewards; None of no problem.

    Args:
        learner: whose iteration it is.
        pending: the problems of this rank, and their completions where they were drawn already.
        attempt: the round.
        numbers: of the problems among those that all ranks draw in this round; their randomness comes from it.
    """
    data, state, problems = learner.data, learner.iteration, pending.problems

    def drawn_now(judging: StreamingRewards | None = None) -> list[Completion]:
        # The 0 was a rank's number once; runs of one process repeat what they drew then.
        seed = derive_seed(data.base_seed, "rollout", learner.trainer.current_epoch, attempt, 0)
        positions = numbers if data.slots.world_size > 1 else None
        with state.timed("generate"):
            return draw(
                learner, problems, data.task, data.group_size, seed, "rollout", positions=positions, judging=judging
            )

    if not problems:
        if data.engine.draws_together:  # this process has a part of it, which the others ask
            drawn_now()
        return None
    streams = pending.completions is None and not isinstance(data.task, TakesTurns)
    with closing(data.judging(problems, streams)) as judging:
        completions = pending.completions
        if completions is None:
            completions = drawn_now(judging)
        if judging.streams:
            state.hidden = (state.hidden or 0.0) + judging.seconds
        tell_episodes(learner, completions)
        ids = [problem.prompt_ids for problem in problems]
        batch = assemble(ids, completions, data.group_size, learner.policy.pad_token_id)
        with state.timed("reward"):
            begun = judging.begun_with(completions)
            samples = judging.samples(completions)
            batch.rewards, batch.reward_parts, failed = data.reward(samples, data.group_size, begun=begun)
    unscored = batch.rewards.isnan()
    batch.mask[unscored] = False  # its tokens are in no loss, no correction and no metric
    state.metrics.values("reward/unscored", unscored.float())
    state.metrics.total("guard/reward_errors", failed)
    solved = data.solved(batch.reward_parts)
    if solved is not None:
        state.metrics.values("rollout/accuracy", solved.float())
    return batch


@torch.no_grad()
def masked_anew(learner: Learner, rollout: RolloutBatch) -> list[RolloutBatch]:
    """Return the rollout as each pass sees it, the first as it is: alone where log-probs are no estimates.

    Those of masked diffusion are under masks, which each pass draws anew; so the sampler's are estimated again.
    """
    if rollout.mask_seed is None or not isinstance(learner.data.engine, Estimates):
        return [rollout]
    passes = [rollout]
    for number in range(1, learner.data.passes):
        seeds = [derive_seed(seed, "pass", number) for seed in rollout.mask_seed.tolist()]
        again = replace(rollout, mask_seed=torch.tensor(seeds))
        again.sampler_logprobs = learner.data.engine.estimate(again)
        passes.append(again)
    return passes


@torch.no_grad()
def score(learner: Learner, rollout: RolloutBatch) -> RolloutBatch:
    """Return the rollout with learner_old's and the reference's log-probs, where needed, and advantages."""
    data, objective = learner.data, learner.objective
    chunks = data.budget.scoring_passes(learner, rollout)
    if scored_when(learner) is ScoredWhen.BEFORE:
        routes, rollout.router_logprobs = scored_routes(learner, rollout)
        rollout.learner_old_logprobs = learner.score(rollout, chunks, routes)
        rollout.routed_experts = rollout.routed_experts if routes is None else routes
    if objective.kl_coefficient > 0 and not objective.diverges:
        with learner.policy.reference():  # another model, whose routers choose for themselves
            rollout.reference_logprobs = learner.score(
                replace(rollout, routed_experts=None, router_logprobs=None), chunks
            )
    rollout.advantages = objective.rollout_advantages(
        rollout, data.group_size, data.max_completion_tokens, learner.reduce
    )
    return rollout


def deal(learner: Learner, passes: Sequence[RolloutBatch]) -> Iterator[MicroBatch]:
    """Yield this rank's part of the micro-batches of every pass; groups stay whole within a mini-batch.

    Args:
        learner: that is updated.
        passes: the rollout as each pass sees it, or one for all.
    """
    data = learner.data
    generator = torch.Generator().manual_seed(derive_seed(data.base_seed, "deal", learner.trainer.current_epoch))
    steps: list[tuple[RolloutBatch, torch.Tensor]] = []
    for number in range(data.passes):
        rollout = passes[min(number, len(passes) - 1)]
        dealt = data.slots.mini_batches_of_pass(generator)
        steps += [(rollout, rows_of(groups, data.group_size).to(learner.device)) for groups in dealt]
    data.budget.begin(learner, steps)
    for rollout, rows in steps:
        mini_batch = rollout.select(rows, trim=False)
        with learner.iteration.timed("score"):
            total, has_signal = correct(learner, mini_batch)
        parts = data.budget.deal(learner, mini_batch)
        # cut and laid out before the first pass: whatever the host must see would make it wait for the pass before
        chosen = [torch.tensor(part, device=rows.device) for part in parts]
        made = [laid_out(learner.policy.network, mini_batch.select(part)) for part in chosen]
        del mini_batch
        for part in chosen:
            yield MicroBatch(made.pop(0), total, rows[part], has_signal)
