"""The contract of a rollout engine: it holds the sampler, draws completions, and receives published weights.

`RolloutEngine` is what every engine does; what only some do are protocols, which are asked for by `isinstance`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lit_qrl.formats.base import NumberFormat
from lit_qrl.network.denoising import Estimator
from lit_qrl.precision.vllm_kernels.borrowed import WeightStore
from lit_qrl.receipts.ledger import PublishReport, TensorReceipt, read_receipts
from lit_qrl.run.description import Described
from lit_qrl.types import Completion, RolloutBatch, SamplingParams

Progress = Callable[[int, int], None]
"""Called during generation with (sequences finished, tokens drawn so far)."""


Finished = Callable[[Mapping[int, Completion]], None]
"""Called during generation with completions that are done, by their numbers in what `generate` returns; an engine may
call it again with the same, and leave out what it records beside tokens and log-probs."""


InFlight = Literal["none", "keep", "recompute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learners:
    """The learner's processes, as an engine must know them that takes devices of its own.

    Args:
        devices: GPUs that they use on this host, by number.
        local: number of this process among those of its host, and how many they are.
        whole: the same among those of the run.
    """

    devices: tuple[int, ...] = ()
    local: tuple[int, int] = (0, 1)
    whole: tuple[int, int] = (0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSpec:
    """What is known of a run's sampler before its engine starts.

    Args:
        sampling: how rollouts are drawn.
        format: of the layers that are published quantized; None where every tensor is plain.
        aligned: the learner computes in that format too.
        exclude: name patterns of linear layers that stay plain, beside embeddings, head and routers.
        quantize_head: the output head comes in the format too.
        compute_dtype: of the learner's products where it is not its weights': bf16 under autocast over fp32 weights.
        head_dtype: that the learner computes its logits in, and an engine that can does too; None is the weights'.
        adapter: the PEFT config of an adapter that is published beside its base; None where there is none, or merged.
        prompt_limit: longest prompt in tokens, where it is known.
        sequence_limit: longest prompt and completion together, where evaluations draw longer ones than rollouts.
        evaluation_limits: longest completion, in tokens, of each evaluation.
        decode_steps: that the run's rollouts take at most, as far as that is known: iterations times tokens.
        estimator: of the log-probs of a masked-diffusion policy; None for a causal one.
        outlives_update: completions are drawn after updates that were not published, so that an engine which shares
            the learner's tensors must copy them.
        routes: record which experts each token takes, in `Completion.routed_experts`; only where the engine is one of
            `RecordsRoutes`.
        kept: record the ids among which `top_p` and `top_k` let each token of a rollout be drawn, in
            `Completion.kept`; only where the engine has `records_kept`.
        learners: the processes of the learner.
        in_flight: what becomes of the keys and values of completions under way when weights come: `keep` them, or
            `recompute` them; `none` takes weights between two calls alone.
        on_hang: called with a sentence, in a thread of its own, when the engine hangs beyond recovery, just before it
            ends the process.

    >>> SamplerSpec(prompt_limit=256).sampling.max_tokens
    256
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    format: NumberFormat | None = None
    aligned: bool = False
    exclude: tuple[str, ...] = ()
    quantize_head: bool = False
    compute_dtype: torch.dtype | None = None
    head_dtype: torch.dtype | None = None
    adapter: Any = None
    prompt_limit: int | None = None
    sequence_limit: int | None = None
    evaluation_limits: tuple[int, ...] = ()
    decode_steps: int = 0
    estimator: Estimator | None = None
    outlives_update: bool = False
    routes: bool = False
    kept: bool = False
    learners: Learners = Learners()
    in_flight: InFlight = "none"
    on_hang: Callable[[str], None] | None = None


Wait = Literal["no", "any", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer that a sequence waits for.

    Args:
        index: number of the sequence.
        tokens: all of it so far, the prompt first.
        max_tokens: of this answer.
        seed: of this answer's own generator.
    """

    index: int
    tokens: list[int]
    max_tokens: int
    seed: int


class Dialogue(Protocol):
    """Sequences whose answers somebody else answers in turn, such as an environment."""

    @property
    def open(self) -> bool:
        """True while some sequence has not ended."""
        ...

    def waiting(self, wait: Wait) -> list[Turn]:
        """Return the turns that can be drawn now; an empty list after about a second in which there was none.

        Args:
            wait: `no` returns what is there, `any` waits for the first, `all` until no more are about to come, for an
                engine that draws them in one batch.
        """
        ...

    def has_ended(self, index: int) -> bool:
        """Return True where a sequence has ended, so that an engine need keep nothing of it."""
        ...

    def answered(self, turn: Turn, completion: Completion) -> None:
        """Take the answer of a turn."""
        ...


class EnginePolicy(Protocol):
    """What an engine may ask of the policy: its Hugging Face model."""

    @property
    def network(self) -> nn.Module:
        """The causal language model without adapters merged; `network.config` describes it."""
        ...


class EngineDiedError(RuntimeError):
    """The engine cannot go on: its own error is the cause. `discard` it, `setup` it and publish to build it again."""


class RolloutEngine(Described, ABC):
    """Draws completions from the sampler. What has a body here is for engines that can do more to replace.

    The data module owns the engine, the publisher feeds it, and `setup` runs once, at the first publish, and again
    after a death. Tensors arrive under their checkpoint names (`model.layers.0.mlp.up_proj.weight`, or
    `.weight_packed`, `.weight_scale`, … for a quantized layer), complete fused groups together, layer by layer.
    """

    version: int = -1
    denoises: bool = False
    """True when it draws completions of masked-diffusion models, and of no others."""
    single_format: bool = False
    """True when the engine holds the format it was started with and no other, so that evaluations use it too."""
    max_lora_rank: int = -1
    """Of the adapters that it is built with room for; 0 is no room yet, and -1 where they need none."""
    batch_invariant: bool = False
    """True when a token's log-prob does not depend on what it is computed with; the learner then computes likewise."""
    kernels: str = "torch"
    """Whose kernels multiply packed weights: `torch`, which multiplies them out, or `vllm`."""
    records_kept: bool = False
    """True when it can say among which ids a token was drawn under `top_p` or `top_k`."""
    plain_dtype: torch.dtype | None = None
    """The dtype in which plain tensors must be sent; None takes what comes."""
    hands_out: bool = False
    """True when `generate` takes `finished`, to which it hands completions while others are still drawn."""
    overlaps: bool = False
    """True when it draws in a process of its own, so that the learner can update meanwhile."""
    draws_together: bool = False
    """True when processes of the learner are one engine: each must ask when another does, and none is built alone."""
    sleep_level: int = 0
    """What `sleep` does: 0 nothing, 1 moves the weights off the device, 2 drops them."""

    def validate(self, spec: SamplerSpec) -> None:
        """Raise `ConfigError` for what cannot work on this host; called before any weight is loaded."""

    def check_model(self, network: nn.Module) -> None:
        """Raise `ConfigError` for an architecture that it does not run; called before any weight is loaded."""

    @abstractmethod
    def setup(self, spec: SamplerSpec, policy: EnginePolicy) -> None:
        """Build the sampler's modules; the weights come with the first `load_weights`."""

    def arranged(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Return a stream of weights as this engine takes it, which is what both sides note: here as it comes."""
        return tensors

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        seed: int,
        progress: Progress | None = None,
        sampling: SamplingParams | None = None,
        positions: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Return `n` completions of each prompt, prompt-major; the same seed gives the same tokens.

        Args:
            prompts: token ids of each prompt, without padding.
            n: completions per prompt.
            seed: of this call's own generator; global generators are left alone.
            progress: called now and then with (sequences finished, tokens drawn).
            sampling: replaces that of the spec for this call (evaluation).
            positions: the number of each prompt among those that several processes share, from which its randomness
                comes instead of from its place in this call; only given where there are several.

        Raises:
            EngineDiedError: when the engine failed for a reason of its own; the call can be repeated on a new one.
        """

    @abstractmethod
    def load_weights(
        self, tensors: Iterator[tuple[str, Tensor]], format: NumberFormat | None, version: int
    ) -> PublishReport:
        """Replace the sampler's weights by a whole stream of them.

        Args:
            tensors: checkpoint names and tensors; consumed one by one, never held all at once.
            format: the format of the quantized layers, or None when every tensor is plain.
            version: stamped on the completions from now on.
        """

    def own_part(self, name: str, tensor: Tensor) -> Tensor:
        """Return the part of a sent tensor that this process holds; asked for while a stream is loaded."""
        return tensor

    def read_back(self, name: str) -> Tensor | None:
        """Return the loaded tensor of that checkpoint name, or None where it cannot be read as it was sent."""

    def read_receipts(self, names: Sequence[str]) -> dict[str, TensorReceipt]:
        """Return the receipts of those names that can be read back."""
        return read_receipts(self.read_back, names)

    def read_columns(self, layer: str, columns: Sequence[int]) -> Tensor | None:
        """Return columns ("out columns") of a layer's weight as its GEMM multiplies with them, or None if unknown."""

    @property
    def holds_weights(self) -> bool:
        """False when a whole publish must come before anything is drawn, as after a sleep that dropped the weights."""
        return True

    def sleep(self) -> None:
        """Free the device memory that the learner needs during the update."""

    def wake(self) -> None:
        """Take the memory back before the next publish."""

    def discard(self) -> None:
        """Free what a death left, before `setup` and a publish of all weights: here everything."""
        self.close()

    def close(self) -> None:
        """Free everything."""


@runtime_checkable
class Converses(Protocol):
    """An engine that draws the answers of a dialogue."""

    def converse(self, dialogue: Dialogue, sampling: SamplingParams | None = None) -> None:
        """Draw every turn of a dialogue until it has none.

        Args:
            dialogue: gives turns and takes their answers; an answer has at most its turn's `max_tokens`.
            sampling: replaces that of the spec; its own `max_tokens` is not used.

        Raises:
            EngineDiedError: as `generate` does; the dialogue is then begun again.
        """
        ...


@runtime_checkable
class TakesAdapter(Protocol):
    """An engine that holds an adapter apart from its base."""

    def load_adapter(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> PublishReport:
        """Replace the LoRA adapter over an unchanged base."""
        ...

    def perturb(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> PublishReport:
        """Replace the given norms in place, nothing else."""
        ...


@runtime_checkable
class Scores(Protocol):
    """An engine that scores given tokens."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the sampler's log-probs (fp32, T = 1, "length − 1") of each sequence's tokens after the first."""
        ...


@runtime_checkable
class Estimates(Protocol):
    """An engine of masked diffusion, whose log-probs are estimated under masks."""

    def estimate(self, rollout: RolloutBatch) -> Tensor:
        """Return the sampler's estimates "b t" of a rollout's log-probs, under the masks of its seeds."""
        ...


@runtime_checkable
class RecordsRoutes(Protocol):
    """An engine that can say which experts its tokens took."""

    def check_routes(self, user: str) -> None:
        """Raise `ConfigError` where this installation cannot; called before any weight is loaded.

        Args:
            user: what needs them, for the error.
        """


@runtime_checkable
class Pauses(Protocol):
    """An engine apart, whose draws stop between two steps while another thread gives it weights."""

    def pause(self) -> None:
        """Return when nothing is computed; the thread that draws waits until `resume`."""
        ...

    def resume(self, whole: bool = True) -> None:
        """Let it go on, or end with `EngineDiedError` where the weights that came are not whole."""
        ...

    def staged(self, until: Callable[[], None]) -> AbstractContextManager[None]:
        """Within it the first stream of weights is sent while it draws, and replaces those of the engine after `until`.

        Args:
            until: returns when nothing is drawn any more, or raises; called once, after the stream's last tensor.
        """
        ...


@runtime_checkable
class LendsWeights(WeightStore, Protocol):
    """An engine with whose weights a learner may compute in place of its own."""

    def check_sharing(self, format: NumberFormat | None) -> None:
        """Raise `ConfigError` where a learner could not read this engine's weights."""
