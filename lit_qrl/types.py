"""The vocabulary and the records that pass between the parts.

========== =====================================================================================================
word       meaning
========== =====================================================================================================
sampler    the policy in the engine that drew the tokens (low precision, maybe noisy, maybe stale)
learner    the policy being trained; `learner_old` is the learner at the moment of the rollout (θ_old)
logprobs   natural log, fp32, of the processed distribution (after temperature)
log_ratio  `learner_old − sampler` per token, detached: the mismatch, in nats; called `d` in formulas
mask       True on completion tokens that count in the loss
weights    per-token multipliers of the surrogate (importance weights)
keep       per-token True/False: False removes the token from the loss *and* from its denominator (rejection)
version    integer, +1 at each publish; stamped on every rollout
========== =====================================================================================================

Shapes: `b` sequences, `s` prompt + completion tokens, `t` completion tokens, `g` completions per prompt, `v` words.
Prompts are padded on the left to `s − t` columns and completions on the right, so index 0 of `t` is the first
completion token of every row and `tokens[:, s − t:]` are the completions.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

FinishReason = Literal["stop", "length"]
EpisodeEnd = Literal["done", "turns", "length", "time", "error"]


@runtime_checkable
class AllReduce(Protocol):
    """Reduces a tensor over all ranks and returns it; the identity in a single process."""

    def __call__(self, value: Tensor, op: Literal["sum", "max", "min"] = "sum") -> Tensor: ...


def no_all_reduce(value: Tensor, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
    """Return `value`: the `AllReduce` of a single process."""
    return value


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How an engine draws tokens.

    Args:
        max_tokens: completion limit, in tokens.
        temperature: 0 is greedy; log-probs are those of the distribution after division by it (greedy: T = 1).
        top_p: nucleus mass in (0, 1].
        top_k: number of most likely tokens kept; 0 keeps all.
        stop_token_ids: a completion ends with (and includes) the first of these.
        ignore_stop: never stop before `max_tokens` (benchmarks).
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_stop: bool = False

    @property
    def truncated(self) -> bool:
        """True when the sampled distribution is not the full softmax."""
        return self.top_p < 1.0 or self.top_k > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What an environment says of a sequence whose turns it answered.

    Args:
        score: the environment's own; None where it failed, which leaves the sequence out.
        ended: `done` by the environment, at the limit of `turns`, `length` (tokens) or `time`, or by an `error` of the
            environment.
        turns: answers that the sampler gave.
        error: the environment's, in a line; empty without one.
    """

    score: float | None
    ended: EpisodeEnd
    turns: int
    error: str = ""


@dataclass(slots=True, kw_only=True)
class Completion:
    """One sampled completion.

    Args:
        token_ids: with the stop token; of several turns, what the environment said in between too.
        logprobs: processed log-probs of the tokens, 0 where the environment's are.
        finish_reason: why it ended.
        version: of the weights that drew it, or its first token.
        drawn: True for the sampler's tokens, False for the environment's; None where all are the sampler's.
        episode: of several turns, how they went.
        routed_experts: "tokens layers k", which experts each token of prompt and completion took, where the engine
            records them; see `network.routing`. The last token's are not known: nothing is computed of it.
        mask_seed: of masked diffusion: the seed of the masks under which its log-probs are estimated.
        drawn_over: of masked diffusion: positions that it was drawn over, those behind its end too.
        unmasked_at: of masked diffusion: the step at which each token was unmasked, from 0.
        kept: for each token, the ids " k" among which it was drawn under `top_p` or `top_k`, where the engine records
            them; none of them for the environment's tokens.
        versions: of the weights that drew each token, where they changed on the way; None where they did not.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    version: int
    drawn: list[bool] | None = None
    episode: Episode | None = None
    routed_experts: Tensor | None = None
    mask_seed: int | None = None
    drawn_over: int | None = None
    unmasked_at: list[int] | None = None
    kept: list[Tensor] | None = None
    versions: list[int] | None = None

    def __post_init__(self) -> None:
        if self.versions is not None and len(set(self.versions)) < 2:
            self.versions = None

    def cut(self, tokens: int) -> "Completion":
        """Return the first tokens of it; the same where it is not longer.

        >>> Completion(token_ids=[5, 6], logprobs=[-1.0, -2.0], finish_reason="stop", version=0).cut(1).finish_reason
        'length'
        """
        if len(self.token_ids) <= tokens:
            return self
        routes = self.routed_experts
        return replace(
            self,
            token_ids=self.token_ids[:tokens],
            logprobs=self.logprobs[:tokens],
            finish_reason="length",
            routed_experts=None if routes is None else routes[: len(routes) - len(self.token_ids) + tokens],
            kept=None if self.kept is None else self.kept[:tokens],
            versions=None if self.versions is None else self.versions[:tokens],
        )


@dataclass(slots=True, kw_only=True)
class RolloutBatch:
    """All sequences of one iteration, or any slice of them; see the module docstring for padding.

    A reward that is NaN was not given: the sequence is left out of its group's statistics, and its mask is False.
    `routed_experts` "b s layers k" is the choice of experts that the learner's forward passes replay, whoever recorded
    it; None where its routers choose. `router_logprobs`, as wide, is what learner_old's routers give these experts.
    `kept` "b t k" are the ids among which each token was drawn under `top_p` or `top_k`, −1 behind them; the learner's
    log-probs are then of the distribution over those too. None where all tokens could be drawn, or nothing asks.
    `version` is of the weights that drew a sequence's first token; `versions` "b t" of each token, where they changed
    within a sequence of the batch, else None.
    `mask_seed`, `drawn_over` and `unmasked_at` are of masked diffusion, as in `Completion`. `layout` is how a network
    lays these very rows out without padding, where `padding_free.laid_out` made it; a selection of rows drops it.
    """

    tokens: Int[Tensor, "b s"]
    prompt_length: Int[Tensor, " b"]
    mask: Bool[Tensor, "b t"]
    sampler_logprobs: Float[Tensor, "b t"]
    rewards: Float[Tensor, " b"]
    advantages: Float[Tensor, " b"]
    group: Int[Tensor, " b"]
    version: Int[Tensor, " b"]
    stopped: Bool[Tensor, " b"]
    reward_parts: dict[str, Float[Tensor, " b"]] = field(default_factory=dict)
    learner_old_logprobs: Float[Tensor, "b t"] | None = None
    reference_logprobs: Float[Tensor, "b t"] | None = None
    routed_experts: Tensor | None = None
    router_logprobs: Tensor | None = None
    weights: Float[Tensor, "b t"] | None = None
    keep: Bool[Tensor, "b t"] | None = None
    kept: Int[Tensor, "b t k"] | None = None
    versions: Int[Tensor, "b t"] | None = None
    mask_seed: Int[Tensor, " b"] | None = None
    drawn_over: Int[Tensor, " b"] | None = None
    unmasked_at: Int[Tensor, "b t"] | None = None
    layout: Any = field(default=None, repr=False, compare=False)

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def completion_length(self) -> Int[Tensor, " b"]:
        """Number of unmasked completion tokens of each sequence."""
        return self.mask.sum(dim=1)

    @property
    def total_length(self) -> Int[Tensor, " b"]:
        """Tokens of each sequence: its prompt, and its completion up to the last unmasked token."""
        columns = torch.arange(1, self.mask.shape[1] + 1, device=self.mask.device)
        return self.prompt_length + (self.mask * columns).amax(dim=1)

    def select(self, rows: Tensor, *, trim: bool = True) -> "RolloutBatch":
        """Return the given rows; `trim` drops columns that are padding in all of them."""
        chosen = self._map(lambda tensor: tensor[rows])
        if not trim or len(chosen) == 0:
            return chosen
        s, t = self.tokens.shape[1], self.mask.shape[1]
        left = s - t - int(chosen.prompt_length.max())
        used = chosen.mask.any(dim=0).nonzero()
        t_used = max(int(used.max()) + 1, 1) if len(used) else 1
        kept = {f.name: getattr(chosen, f.name) for f in fields(chosen)}
        for name, value in kept.items():
            if isinstance(value, Tensor) and value.ndim >= 2:
                kept[name] = value[:, left : s - t + t_used] if value.shape[1] == s else value[:, :t_used]
        return RolloutBatch(**kept)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "RolloutBatch":
        """Return a copy on `device`; dtypes stay as they are."""
        moved = self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))
        return moved if self.layout is None else replace(moved, layout=self.layout.to(device))

    def _map(self, function: Callable[[Tensor], Tensor]) -> "RolloutBatch":
        changed: dict[str, Any] = {"layout": None}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                changed[f.name] = function(value)
            elif isinstance(value, dict):
                changed[f.name] = {name: function(tensor) for name, tensor in value.items()}
        return replace(self, **changed)


class TokenScores(NamedTuple):
    """What the policy says of a batch: log-probs "b t" and, where asked for, entropies "b t" and its routers' choices.

    The choices are "b s layers k", as in `network.routing`, and as wide what the routers give the experts taken.
    The divergence "b t" is KL(policy‖reference) over the vocabulary, where asked for.
    """

    logprobs: Tensor
    entropy: Tensor | None
    routes: Tensor | None = None
    gates: Tensor | None = None
    divergence: Tensor | None = None


class MicroBatch:
    """What the data loader yields: a slice of the rollout plus the denominator of its whole mini-batch.

    A plain class on purpose: Lightning moves whatever has `.to`, but recurses into dataclasses, mappings and tuples,
    where its half-precision plugins would cast the log-probs to bf16 (an error of up to 0.03 nats).

    Args:
        batch: the sequences of this micro-batch.
        total: what the loss sum is divided by, global over the mini-batch and all ranks: kept tokens, or sequences.
        rows: positions of these sequences in the iteration's rollout.
        has_signal: whether some kept sequence of the mini-batch, on any rank, has an advantage; with an entropy or a KL
            in the loss, whether any is kept.
    """

    def __init__(self, batch: RolloutBatch, total: Tensor, rows: Tensor, has_signal: Tensor) -> None:
        self.batch, self.total, self.rows, self.has_signal = batch, total, rows, has_signal

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "MicroBatch":
        """Return a copy on `device`."""
        return MicroBatch(
            self.batch.to(device, non_blocking),
            self.total.to(device),
            self.rows.to(device, non_blocking=non_blocking),
            self.has_signal.to(device, non_blocking=non_blocking),
        )

    def __len__(self) -> int:
        return len(self.batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossContext:
    """What a correction may look at: one whole mini-batch, or parts of it where it `needs` no more; detached, fp32.

    Args:
        learner_old: log-probs of the learner at the moment of the rollout.
        sampler: log-probs of the engine.
        log_ratio: learner_old − sampler, exactly 0 where mask is False.
        mask: completion tokens that count.
        advantages: one per sequence.
        version: the published version that drew each sequence, or its first token.
        all_reduce: sums over ranks, so that statistics are global.
        versions: of each token, where weights changed within a sequence; else None.
    """

    learner_old: Float[Tensor, "b t"]
    sampler: Float[Tensor, "b t"]
    log_ratio: Float[Tensor, "b t"]
    mask: Bool[Tensor, "b t"]
    advantages: Float[Tensor, " b"]
    version: Int[Tensor, " b"]
    all_reduce: AllReduce = no_all_reduce
    versions: Int[Tensor, "b t"] | None = None


@dataclass(slots=True)
class Correction:
    """What a correction returns: multipliers, tokens to keep, and scalars to log. `None` changes nothing."""

    weights: Float[Tensor, "b t"] | None = None
    keep: Bool[Tensor, "b t"] | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class ObjectiveTerms:
    """What an objective returns: the loss of every token, not yet reduced, and metrics as vectors (sum, count)."""

    loss: Float[Tensor, "b t"]
    metrics: dict[str, Tensor] = field(default_factory=dict)
