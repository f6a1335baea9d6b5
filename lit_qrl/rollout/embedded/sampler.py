"""What engines of Hugging Face modules in this process share: the sampler's modules, and how they are published to."""

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from lit_qrl.errors import ConfigError, asked, check_choice, out_of_memory
from lit_qrl.formats.base import NumberFormat
from lit_qrl.formats.dense import Dense
from lit_qrl.formats.support import tell_emulated
from lit_qrl.network.autocast import computing_in
from lit_qrl.network.head import SamplerHead
from lit_qrl.network.invariant import batch_invariant
from lit_qrl.network.shards import is_sharded
from lit_qrl.network.structure import body, cached, check_positions, check_tokens, computed_buffers
from lit_qrl.receipts.ledger import Constants, PublishReport, ReceivedLedger, RefusedError
from lit_qrl.rollout.embedded.cache import ScoringCache
from lit_qrl.rollout.embedded.decode import plan
from lit_qrl.rollout.embedded.loading import EmbeddedAdapter, Loader, Modules, skeleton
from lit_qrl.rollout.embedded.sampling import check_sampling
from lit_qrl.rollout.engine import EngineDiedError, EnginePolicy, Finished, Progress, RolloutEngine, SamplerSpec
from lit_qrl.types import Completion, SamplingParams

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

DTYPES = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def computed(method: Callable[Concatenate[Any, Arguments], Result]) -> Callable[Concatenate[Any, Arguments], Result]:
    """Return a method of an `EmbeddedSampler` so made that it computes in the sampler's arithmetic, whoever calls."""

    @wraps(method)
    def inside(self: "EmbeddedSampler", /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        device = self.network.get_input_embeddings().weight.device
        with computing_in(self.network, device.type, self.computes):
            return method(self, *args, **kwargs)

    return inside


log = logging.getLogger(__name__)

SCORE_TOKENS = 2**14
"""Padded tokens of one scoring forward."""
UNLIMITED = 2**62
"""Tokens that fit as long as memory has not run out."""


class Shortage:
    """Remembers how much fitted into memory, from an engine's start to its end."""

    def __init__(self) -> None:
        self.fitting = UNLIMITED

    def halving(
        self,
        batch: list[int],
        longest: int,
        draw: Callable[[list[int], int], Result],
        most: int | None = None,
        done: str = "decoded",
    ) -> Iterator[tuple[list[int], Result]]:
        """Yield what is drawn for a batch, in halves where memory runs out; later batches are not larger than those.

        Args:
            batch: numbers of sequences.
            longest: of them, prompt and completion, in tokens.
            draw: the completions of a part of it, so many at once; they depend on both by rounding alone.
            most: sequences at once, where others take the place of those that have ended; None splits the batch.
            done: what is done to them, as a participle.

        Raises:
            EngineDiedError: when memory does not do for one sequence.
        """
        waiting = [batch]
        while waiting:
            fits = max(1, self.fitting // longest)
            if most is None:
                waiting = [part[i : i + fits] for part in waiting for i in range(0, len(part), fits)]
            part = waiting.pop(0)
            rows = min(len(part), fits, most or fits)
            try:
                drawn = draw(part, rows)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                said, half = asked(error), rows // 2
                if not half:
                    raise EngineDiedError(
                        f"Memory ran out while one sequence was {done}: {said}. Lower data.max_completion_tokens or "
                        "data.max_prompt_tokens, or leave the sampler more of the device's memory."
                    ) from error
                traceback.clear_frames(error.__traceback__)  # they hold the batch's tensors
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                log.warning(
                    "Memory ran out while %d sequences were %s (%s): going on with %d at a time. Lower "
                    "data.engine.max_batch or data.engine.cache_gigabytes to begin with fewer.",
                    *(rows, done, said, half),
                )
                self.fitting = half * longest
                waiting.insert(0, part)
            else:
                yield part, drawn
                del drawn


class EmbeddedSampler(RolloutEngine):
    """Holds the sampler as Hugging Face modules of its own; a subclass draws with them.

    Weights that are published as they are (no format, no noise) are not copied: the sampler then holds the learner's
    very tensors, so that there is one copy in memory. A format whose GEMM the device lacks is emulated, with the same
    numbers at the speed of fp32. Where the learner computes under autocast, so does the sampler, unless a dtype was
    chosen for it: `dtype`, or a published format such as bf16.

    Args:
        max_batch: sequences drawn at once; None takes what memory allows.
        dtype: what unquantized tensors are cast to; `auto` keeps them as they are published.
        share: `auto` holds the learner's own tensors where nothing was changed, `never` copies.
        keep_operands: let quantized layers keep their dequantized weights between calls: faster, more memory.
    """

    def __init__(
        self,
        max_batch: int | None = None,
        dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
        share: Literal["auto", "never"] = "auto",
        keep_operands: bool = True,
    ) -> None:
        if max_batch is not None and max_batch < 1:
            raise ConfigError("engine.max_batch is too small.", expected="at least 1", given=max_batch)
        self.max_batch = max_batch
        check_choice("data.engine.dtype", dtype, tuple(DTYPES))
        check_choice("data.engine.share", share, ("auto", "never"))
        self.dtype, self.share, self.keep_operands = DTYPES[dtype], share, keep_operands
        self.plain_dtype = self.dtype
        self.spec = SamplerSpec()
        self._modules: Modules | None = None
        self._adapter: EmbeddedAdapter | None = None
        self._borrowed: list[tuple[Tensor, int]] = []
        self._constants = Constants(dict)
        self._whole = False
        self.computes: torch.dtype | None = None
        self._shortage = Shortage()

    def validate(self, spec: SamplerSpec) -> None:
        check_sampling(spec.sampling)

    def setup(self, spec: SamplerSpec, policy: EnginePolicy) -> None:
        check_sampling(spec.sampling)
        self.spec, self.policy = spec, policy
        learner: Any = policy.network
        self.check_model(learner)
        device = next(learner.parameters()).device
        self._modules, self._adapter = Modules(skeleton(learner, device), device), None
        self._whole, self._shortage = False, Shortage()
        self._constants = Constants(partial(computed_buffers, self._modules.network, beside_weights=True))

    def autocast_of(self, spec: SamplerSpec, format: NumberFormat | None) -> torch.dtype | None:
        """Return the dtype of the autocast that weights of a format are drawn from under, the learner's, or None."""
        return None if self.dtype is not None or isinstance(format, Dense) else spec.compute_dtype

    @property
    def network(self) -> Any:
        """The sampler's Hugging Face model."""
        if self._modules is None or not self._whole:
            raise RuntimeError(
                "The engine holds no whole set of weights: publish to it first. In a run WeightPublisher does, one of "
                "the callbacks that lit_qrl.default_callbacks(…) makes for the Trainer."
            )
        return self._modules.network

    # -------------------------------------------------------------------------------------------------------- weights

    @torch.no_grad()
    def load_weights(
        self, tensors: Iterator[tuple[str, Tensor]], format: NumberFormat | None, version: int
    ) -> PublishReport:
        if self._modules is None:
            raise RuntimeError("The engine is not set up: call setup(spec, policy) first.")
        tell_emulated(type(self).__name__, format, self._modules.device)
        self._whole = False
        if self._adapter is not None:
            self._adapter.remove()
        learner = self.policy.network
        # Of a learner in parts whole tensors are made for the publish, and are nobody else's.
        owned = set() if is_sharded(learner) else {p.untyped_storage().data_ptr() for p in learner.parameters()}
        share = self.share == "auto" and not self.spec.outlives_update
        loader = Loader(self._modules, format, version, self.dtype, owned, share, self.keep_operands)
        loader.load(tensors)
        loader.received.faults += self._constants.faults()
        self.loaded(self._modules)
        self.computes = self.autocast_of(self.spec, format)
        self._borrowed, self._whole, self.version = loader.borrowed, True, version
        return PublishReport(
            version=version,
            bytes=loader.bytes,
            layers=loader.layers,
            received=loader.received,
        )

    def loaded(self, modules: Modules) -> None:
        """Called when the weights of a publish are whole, before anything is drawn with them."""

    def read_back(self, name: str) -> Tensor | None:
        """Return the tensor that the sampler's modules hold under a checkpoint name, or None."""
        return None if self._modules is None else self._modules.held(name)

    @torch.no_grad()
    def load_adapter(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> PublishReport:
        """Replace the LoRA adapter over an unchanged base; the low-rank term is added unmerged, in its own dtype."""
        _ = self.network  # which says so where no base was published
        assert self._modules is not None
        if self._adapter is None:
            self._adapter = EmbeddedAdapter(self._modules, self.spec.adapter)
        received = ReceivedLedger(version)
        self._adapter.load(tensors, received)
        return self._partial(received)

    @torch.no_grad()
    def perturb(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> PublishReport:
        """Replace the given norms in place, nothing else."""
        received, network, modules = ReceivedLedger(version), self.network, self._modules
        assert modules is not None
        for name, tensor in tensors:
            if modules.shapes.get(name) != tuple(tensor.shape) or tensor.ndim != 1:
                raise RefusedError(
                    f"{name} is not a norm of the sampler. Expected: the name and shape of a norm's weight."
                )
            held = network.get_parameter(name)
            modules.set_plain(name, tensor.detach().to(device=held.device, dtype=held.dtype, copy=True))
            received.record(name, network.get_parameter(name))
        return self._partial(received)

    def _partial(self, received: ReceivedLedger) -> PublishReport:
        self.version = received.version
        received.faults += self._constants.faults()
        return PublishReport(
            version=received.version,
            bytes=received.bytes,
            layers={name: receipt.dtype for name, receipt in received.receipts().items()},
            received=received,
        )

    @computed
    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the sampler's log-probs (fp32, T = 1, "length − 1") of each sequence's tokens after the first.

        Of a model that looks both ways these mean nothing as probabilities; their arithmetic is that of any forward.
        """
        self._check_current()
        network, shortage, scales = self.network, Shortage(), self.cache_scales(sequences)
        head = SamplerHead.of(network, self.spec.head_dtype)
        device = network.get_input_embeddings().weight.device
        scores: dict[int, Tensor] = {}

        def scored(numbers: list[int], rows: int) -> Tensor:
            share = [sequences[number] for number in numbers]
            tokens = torch.tensor([[*one, *[0] * (len(share[0]) - len(one))] for one in share]).to(device)
            cache = None if scales is None else ScoringCache(scales)
            with batch_invariant(self.batch_invariant):
                states = body(network)(input_ids=tokens, **cached(network, cache))
                return head.logprobs(states.last_hidden_state[:, :-1], tokens[:, 1:])

        for batch in plan([len(one) for one in sequences], 1, 0, SCORE_TOKENS, None, padded=not self.denoises):
            for numbers, logprobs in shortage.halving(batch, len(sequences[batch[0]]), scored, done="scored"):
                for row, number in enumerate(numbers):
                    scores[number] = logprobs[row, : len(sequences[number]) - 1].clone()
        return [scores[index] for index in range(len(sequences))]

    def cache_scales(self, sequences: Sequence[Sequence[int]]) -> Tensor | None:
        """Return the scales at which keys and values are kept in E4M3; None keeps them as they are."""

    def _check_current(self) -> None:
        """The learner's own tensors may have moved on since they were published."""
        if any(tensor._version != version for tensor, version in self._borrowed):
            raise RuntimeError(
                f"The sampler shares the learner's weights, and they changed after version {self.version} was "
                "published. Publish before generating, or set data.engine.share to never to sample from older weights."
            )

    def _check(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> None:
        """Raise where prompts cannot be answered, or not by these weights."""
        check_sampling(sampling)
        if not prompts or min(map(len, prompts)) == 0:
            raise ValueError("A prompt is empty. Expected: at least one prompt, each of at least one token.")
        check_tokens(self.network.config, prompts)
        remedy = "Lower data.max_prompt_tokens or data.max_completion_tokens."
        check_positions(self.network.config, max(map(len, prompts)), sampling.max_tokens, remedy)
        self._check_current()

    def _in_batches(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        batches: Iterable[list[int]],
        steps: int,
        draw: Callable[[Progress, list[int], int], Result],
        read: Callable[[list[int], Result], list[Completion]],
        progress: Progress | None,
        finished: Finished | None = None,
        most: int | None = None,
    ) -> list[Completion]:
        """Return the completions of all prompts, prompt-major, which `read` reads of what `draw` draws of some rows."""
        found: dict[int, Completion] = {}
        tokens = 0

        def report(ended: int, drawn: int) -> None:
            if progress is not None:
                progress(len(found) + ended, tokens + drawn)

        for batch in batches:
            longest = max(len(prompts[row // n]) for row in batch) + steps
            for rows, drawn in self._shortage.halving(batch, longest, partial(draw, report), most):
                new = dict(zip(rows, read(rows, drawn), strict=True))
                found |= new
                tokens += sum(len(one.token_ids) for one in new.values())
                if finished is not None:
                    finished(new)
        return [found[number] for number in range(len(found))]

    def close(self) -> None:
        self._modules, self._adapter, self._borrowed, self._whole = None, None, [], False
        self._constants = Constants(dict)
