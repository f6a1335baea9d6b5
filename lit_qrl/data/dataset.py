"""One iteration of reinforcement learning as an iterable: roll out, score, correct, and deal micro-batches."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.utils.data import IterableDataset

from lit_qrl.loop.batching import assemble, deal_by_length, rows_of
from lit_qrl.loop.hooks import rl_callbacks
from lit_qrl.seeding import derive_seed
from lit_qrl.types import MicroBatch, RolloutBatch

if TYPE_CHECKING:
    from lit_qrl.data.module import RolloutDataModule
    from lit_qrl.module import GRPOModule


class RolloutDataset(IterableDataset):
    """Yields the micro-batches of one iteration each time it is iterated.

    It has a length, because Lightning fetches one batch ahead from a loader without one and every update would be one
    step stale; and `__iter__` is a generator, so that nothing runs before the weights of the iteration are published.
    """

    def __init__(self, data: "RolloutDataModule") -> None:
        self.data = data

    def __len__(self) -> int:
        return self.data.passes * self.data.mini_batches * self.data.micro_batches

    def __iter__(self) -> Iterator[MicroBatch]:
        module = self.data.module
        rollout = self.roll_out(module)
        yield from self.deal(module, rollout)

    def roll_out(self, module: "GRPOModule") -> RolloutBatch:
        """Return the scored rollout of this iteration: completions, rewards, advantages, learner_old log-probs."""
        data, trainer = self.data, module.trainer
        data.unfinished = data.position
        with module.timed("rollout"):
            rollout = self._generate(module)
            data.unfinished = None
            data.generation_ended()
        with module.timed("score"):
            rollout = rollout.to(module.device)
            module.score_rollout(rollout, chunks=data.mini_batches * data.micro_batches, needed=self._needs_old(module))
            rewards = module.objective.shaped_rewards(rollout, data.max_completion_tokens)
            rollout.advantages = module.objective.advantages(rewards, data.group_size, module.reduce)
        module.rollout = rollout
        for callback in rl_callbacks(trainer):
            callback.on_rollout_end(trainer, module, rollout)
        return rollout

    def deal(self, module: "GRPOModule", rollout: RolloutBatch) -> Iterator[MicroBatch]:
        """Yield the micro-batches of every pass; corrections run once on each whole mini-batch."""
        data = self.data
        groups = len(rollout) // data.group_size
        share = groups // data.mini_batches
        generator = torch.Generator().manual_seed(derive_seed(data.base_seed, "deal", module.trainer.current_epoch))
        for _ in range(data.passes):
            order = torch.randperm(groups, generator=generator).tolist()
            for start in range(0, data.mini_batches * share, share):
                rows = rows_of(order[start : start + share], data.group_size).to(module.device)
                mini_batch = rollout.select(rows, trim=False)
                with module.timed("score"):
                    total = module.correct(mini_batch)
                lengths = (mini_batch.prompt_length + mini_batch.completion_length).tolist()
                for part in deal_by_length(lengths, data.micro_batches):
                    chosen = torch.tensor(part, device=rows.device)
                    yield MicroBatch(mini_batch.select(chosen), total, rows[chosen])

    def _generate(self, module: "GRPOModule") -> RolloutBatch:
        """Return the completions with their rewards; groups without variance are drawn again where asked for."""
        data, objective = self.data, module.objective
        wanted, g = data.prompts_per_rank, data.group_size
        parts: list[RolloutBatch] = []
        kept = 0
        for attempt in range(1 + (objective.max_resample if objective.filter_zero_variance else 0)):
            drawn = self._draw(module, wanted - kept, attempt)
            rewards = drawn.rewards.view(-1, g)
            varied = (rewards != rewards[:, :1]).any(dim=1)
            last = not objective.filter_zero_variance or attempt == objective.max_resample or bool(varied.all())
            groups = torch.arange(len(varied)) if last else varied.nonzero().flatten()
            parts.append(drawn.select(rows_of(groups.tolist(), g), trim=False) if len(groups) < len(varied) else drawn)
            kept += len(groups)
            if objective.filter_zero_variance:
                module.iteration.value("rollout/zero_variance_groups", (~varied).float().mean())
            if last:
                break
        return concatenate(parts, data.pad_token_id, g)

    def _draw(self, module: "GRPOModule", prompts: int, attempt: int) -> RolloutBatch:
        data = self.data
        problems = data.next_problems(prompts)
        ids = [problem.prompt_ids for problem in problems]
        seed = derive_seed(data.base_seed, "rollout", module.trainer.current_epoch, attempt, module.global_rank)
        with module.timed("generate"):
            completions = data.draw(ids, data.group_size, seed, "rollout")
        batch = assemble(ids, completions, data.group_size, data.pad_token_id)
        with module.timed("reward"):
            batch.rewards, batch.reward_parts, failed = data.reward(problems, completions)
        module.iteration.value("guard/reward_errors", failed)
        return batch

    def _needs_old(self, module: "GRPOModule") -> bool:
        """Whether learner_old must be scored on its own.

        With one update per rollout and nothing that looks at it before the update, it is the training forward's own
        log-probs.
        """
        updates = self.data.passes * self.data.mini_batches
        decoupled = module.objective.old_logprobs == "decoupled"
        return (updates > 1 and decoupled) or module.corrected or module.objective.carries_ratio


def concatenate(parts: list[RolloutBatch], pad_token_id: int, group_size: int) -> RolloutBatch:
    """Return one batch from several, padded to a common width; groups are numbered anew."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.tokens.shape[1] - part.mask.shape[1] for part in parts)
    t = max(part.mask.shape[1] for part in parts)

    def right(tensor: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(tensor, (0, t - tensor.shape[1]))

    tokens = [
        torch.nn.functional.pad(
            part.tokens, (width - part.tokens.shape[1] + part.mask.shape[1], t - part.mask.shape[1]), value=pad_token_id
        )
        for part in parts
    ]
    names = parts[0].reward_parts
    b = sum(map(len, parts))
    return RolloutBatch(
        tokens=torch.cat(tokens),
        prompt_length=torch.cat([part.prompt_length for part in parts]),
        mask=torch.cat([right(part.mask) for part in parts]),
        sampler_logprobs=torch.cat([right(part.sampler_logprobs) for part in parts]),
        rewards=torch.cat([part.rewards for part in parts]),
        advantages=torch.cat([part.advantages for part in parts]),
        group=torch.arange(b) // group_size,
        version=torch.cat([part.version for part in parts]),
        stopped=torch.cat([part.stopped for part in parts]),
        reward_parts={name: torch.cat([part.reward_parts[name] for part in parts]) for name in names},
    )
