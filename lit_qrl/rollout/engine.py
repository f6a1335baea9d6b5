"""The contract of a rollout engine: it holds the sampler, draws completions, and receives published weights."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from lit_qrl.errors import ConfigError
from lit_qrl.types import Completion, PublishReport, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lit_qrl.formats.base import NumberFormat
    from lit_qrl.precision.vllm_kernels.borrowed import MarlinNVFP4

Progress = Callable[[int, int], None]
"""Called during generation with (sequences finished, tokens drawn so far)."""


class EnginePolicy(Protocol):
    """What an engine may ask of the policy: its Hugging Face model and where it came from."""

    @property
    def network(self) -> nn.Module:
        """The causal language model without adapters merged; `network.config` describes it."""
        ...


class EngineDiedError(RuntimeError):
    """The engine cannot go on: its own error is the cause. `close` it, `setup` it and publish to build it again."""


class RolloutEngine(ABC):
    """Draws completions from the sampler.

    The data module owns the engine, the publisher feeds it, and `setup` runs once, at the first publish. Tensors
    arrive under their checkpoint names (`model.layers.0.mlp.up_proj.weight`, or `.weight_packed`, `.weight_scale`, …
    for a quantized layer), complete fused groups together, layer by layer.
    """

    policy: Any = None
    version: int = -1
    single_format: bool = False
    """True when the engine holds the format it was started with and no other, so that evaluations use it too."""
    kernels: str = "torch"
    """Whose kernels multiply packed weights: `torch`, which multiplies them out, or `vllm`."""
    plain_dtype: torch.dtype | None = None
    """The dtype in which plain tensors must be sent; None takes what comes."""
    prompt_limit: int | None = None
    """Longest prompt in tokens, set by the data module before `validate`."""
    exclude: tuple[str, ...] = ()
    """Name patterns of linear layers that stay plain, set by the publisher before `setup`."""
    quantize_head: bool = False
    """True when the output head comes in the rollout format too, set by the publisher before `validate`."""
    sleep_level: int = 0
    """What `sleep` does: 0 nothing, 1 moves the weights off the device, 2 drops them."""
    on_hang: Callable[[str], None] | None = None
    """Called with a sentence, in a thread of its own, when the engine hangs beyond recovery, just before it ends the
    process; set by the publisher."""

    @property
    def holds_weights(self) -> bool:
        """False when a whole publish must come before anything is drawn: after a death, or a sleep that drops them."""
        return True

    def validate(self, format: "NumberFormat | None", sampling: SamplingParams) -> None:  # noqa: B027
        """Raise `ConfigError` for what cannot work on this host; called before any weight is loaded."""

    @abstractmethod
    def setup(self, policy: EnginePolicy, tokenizer: "PreTrainedTokenizerBase", sampling: SamplingParams) -> None:
        """Build the sampler's modules; the weights come with the first `load_weights`."""

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        seed: int,
        progress: Progress | None = None,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """Return `n` completions of each prompt, prompt-major; the same seed gives the same tokens.

        Args:
            prompts: token ids of each prompt, without padding.
            n: completions per prompt.
            seed: of this call's own generator; global generators are left alone.
            progress: called now and then with (sequences finished, tokens drawn).
            sampling: replaces the parameters given at `setup` for this call (evaluation).

        Raises:
            EngineDiedError: when the engine failed for a reason of its own; the call can be repeated on a new one.
        """

    @abstractmethod
    def load_weights(
        self, tensors: Iterator[tuple[str, Tensor]], format: "NumberFormat | None", version: int
    ) -> PublishReport:
        """Replace the sampler's weights by a whole stream of them.

        Args:
            tensors: checkpoint names and tensors; consumed one by one, never held all at once.
            format: the format of the quantized layers, or None when every tensor is plain.
            version: stamped on the completions from now on.
        """

    def read_back(self, name: str) -> Tensor | None:
        """Return the loaded tensor of that checkpoint name, or None where the engine repacks its layout."""
        return None

    def read_columns(self, layer: str, columns: Sequence[int]) -> Tensor | None:
        """Return columns ("out columns") of a layer's weight as its GEMM multiplies with them, or None if unknown."""
        return None

    def load_adapter(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> PublishReport:
        """Replace the LoRA adapter over an unchanged base."""
        raise NotImplementedError(f"{type(self).__name__} cannot load adapters; set publisher.lora to merged.")

    def perturb(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> PublishReport:
        """Replace the given norms in place, nothing else."""
        raise NotImplementedError(f"{type(self).__name__} cannot replace norms alone.")

    def check_sharing(self, format: "NumberFormat | None") -> None:
        """Raise `ConfigError` where a learner could not read this engine's weights in place of its own."""
        raise ConfigError(
            f"{type(self).__name__} keeps no weights that a learner could share.",
            expected="VLLMEngine on CUDA with nvfp4",
            remedy="Set share_weights to false.",
        )

    def stored_weight(self, layer: str) -> "MarlinNVFP4 | None":
        """Return a linear layer's weight as it lies in the engine's memory, or None where its layout is not known."""
        return None

    @abstractmethod
    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the sampler's log-probs (fp32, T = 1, "length − 1") of each sequence's tokens after the first."""

    def sleep(self) -> None:  # noqa: B027
        """Free the device memory that the learner needs during the update."""

    def wake(self) -> None:  # noqa: B027
        """Take the memory back before the next publish."""

    def close(self) -> None:  # noqa: B027
        """Free everything."""
