"""A fixed probe: the same tokens scored by the engine and by the learner computing as the sampler should.

It sees what no receipt can: a kernel that computes something else with the right weights. It cannot see a stale layer,
whose effect is smaller than rounding; that is what receipts are for.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.modeling_layers import GradientCheckpointingLayer

from lit_qrl.formats.base import NumberFormat
from lit_qrl.loop.contracts import Learner
from lit_qrl.network.adapters import merged_tensors
from lit_qrl.network.autocast import autocast_input
from lit_qrl.network.experts import ExpertStack, expert_stacks, experts_output, one_after_another
from lit_qrl.network.linears import fused_groups, quantizable_linears
from lit_qrl.network.modes import evaluating
from lit_qrl.network.names import base_of, checkpoint_modules, is_adapted
from lit_qrl.network.stream import shared_amax
from lit_qrl.precision.source import WeightSource
from lit_qrl.receipts.ledger import Fault, PublishError
from lit_qrl.rollout.engine import RolloutEngine, Scores

LENGTH = 64
"""Tokens of a probe's sequence, fewer where the engine's longest sequence is shorter."""

# Mean |Δ log p| that a healthy engine stays below at the very first probe, where nothing is known of this model yet:
# bf16 engines were measured at 0.005 to 0.05 and engines with 8-bit activations at up to 0.3, a wrong layer at 0.5 up.
FIRST_BOUND, FIRST_BOUND_ACTIVATIONS = 0.2, 0.4
# Where last bits alone carry further than that, as in a model of random weights, this many times as far as they do.
SENSITIVITY = 2.0
# Later probes may be this much worse than the first: a policy grows sharper, and with it the same rounding errors.
GROWTH = 3.0
# Below this a difference is rounding, whatever the first one was (an fp32 engine starts at 1e-6).
FLOOR = 0.02


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Mean and largest |Δ log p| of a probe, in nats, how many scores were not finite, and the bound on the mean."""

    mean: float
    max: float
    nonfinite: int
    bound: float

    @property
    def passed(self) -> bool:
        """True when the engine computes with the published weights, as far as log-probs tell."""
        return self.nonfinite == 0 and self.mean <= self.bound


class Probe:
    """Scores 8 sequences of random tokens, the same in each run, and compares.

    Args:
        vocabulary: number of token ids to draw from.
        activations: True when the sampler quantizes activations, which differ more.
        length: tokens of each sequence.
        baseline: mean of the first probe that passed, in nats, or None where none did yet.

    >>> probe = Probe(100)
    >>> scores = [torch.zeros(63)] * 8
    >>> probe.compare(scores, [score + 0.01 for score in scores]).passed, probe.compare(scores, scores).bound
    (True, 0.03)
    """

    def __init__(
        self, vocabulary: int, activations: bool = False, length: int = LENGTH, baseline: float | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens: list[list[int]] = torch.randint(vocabulary, (8, length), generator=generator).tolist()
        self.first_bound = FIRST_BOUND_ACTIVATIONS if activations else FIRST_BOUND
        self.baseline = baseline

    def compare(
        self, engine: Sequence[Tensor], learner: Sequence[Tensor], jittered: Sequence[Tensor] | None = None
    ) -> ProbeResult:
        """Return how far the engine's scores are from the learner's; the first that passes becomes the baseline.

        Args:
            engine: the engine's `score` of `tokens`.
            learner: `learner_scores` of them.
            jittered: the same with a `jitter`, which raises the first bound where last bits alone carry further.
        """
        difference = _difference(engine, learner)
        finite = difference.isfinite()
        kept = difference[finite] if finite.any() else difference.new_zeros(1)
        mean = float(kept.mean())
        bound = self.first_bound if self.baseline is None else round(max(GROWTH * self.baseline, FLOOR), 6)
        if self.baseline is None and jittered is not None:
            carried = float(_difference(jittered, learner).nan_to_num(0.0, 0.0, 0.0).mean())
            bound = max(bound, round(SENSITIVITY * carried, 6))
        result = ProbeResult(mean, float(kept.max()), int((~finite).sum()), bound)
        if self.baseline is None and result.passed:
            self.baseline = mean
        return result


def _difference(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    return (torch.cat([s.cpu() for s in one]) - torch.cat([s.cpu() for s in other])).double().abs()


def check_scores(
    learner: Learner,
    engine: RolloutEngine,
    source: WeightSource,
    merged: bool,
    altered: Mapping[str, Tensor],
    version: int,
    baseline: float | None,
) -> float | None:
    """Score the probe on both sides and return the baseline of later ones; an engine that cannot score is not compared.

    Args:
        learner: with the policy, and the Trainer under whose precision plugin it computes.
        engine: that was published to.
        source: of what was published.
        merged: False when an adapter stands beside the base.
        altered: tensors that callbacks changed, by parameter name; an empty one stands for a whole matrix.
        version: of the publish.
        baseline: what the probe before returned.

    Raises:
        PublishError: when the mean difference is beyond the bound, or a score is not finite.
    """
    if (source.packed and not source.aligned) or any(tensor.numel() == 0 for tensor in altered.values()):
        return baseline  # the learner cannot compute as this sampler does
    if not isinstance(engine, Scores):
        return baseline
    network, data = learner.policy.network, learner.data
    noisy = source.format is not None and source.format.quantizes_activations
    length = min(LENGTH, data.max_prompt_tokens + data.max_completion_tokens)
    probe = Probe(network.config.get_text_config().vocab_size, noisy, length, baseline)
    settings: dict[str, Any] = {
        "format": None if source.aligned else source.format,
        "exclude": source.exclude,
        "head": source.head,
        "merged": merged,
        "overrides": dict(altered) or None,
    }
    computing = learner.trainer.precision_plugin.forward_context()
    with learner.iteration.timed("verify"), computing, source.as_sampled():
        expected = learner_scores(network, probe.tokens, **settings)
        scores = engine.score(probe.tokens)
        result = probe.compare(scores, expected)
        if not result.passed and baseline is None:
            dtype = source.plain_dtype(engine.plain_dtype) or next(network.parameters()).dtype
            jittered = learner_scores(network, probe.tokens, **settings, jitter=torch.finfo(dtype).eps / 2)
            result = probe.compare(scores, expected, jittered)
    learner.iteration.metrics.update(
        {"publish/probe_mean": result.mean, "publish/probe_max": result.max, "publish/probe_bound": result.bound}
    )
    if not result.passed:
        raise PublishError([Fault("probe", "the sampler", _measured(result))], version)
    return probe.baseline


def _measured(result: ProbeResult) -> str:
    scores = f"mean |Δ log p| {result.mean:.3g}, at most {result.bound:.3g} expected"
    return f"{result.nonfinite} scores are not finite" if result.nonfinite else scores


@torch.no_grad()
def learner_scores(
    network: Any,
    tokens: Sequence[Sequence[int]],
    format: NumberFormat | None = None,
    exclude: Collection[str] = (),
    merged: bool = True,
    dtype: torch.dtype | None = None,
    overrides: Mapping[str, Tensor] | None = None,
    jitter: float = 0.0,
    head: bool = False,
) -> list[Tensor]:
    """Return the log-probs (fp32, T = 1, "length − 1") of the learner computing with the sampler's weights.

    Args:
        network: the learner's Hugging Face model, adapters inside.
        tokens: sequences of one length.
        format: the sampler's number format; its GEMM is emulated, activations included.
        exclude: name patterns of layers that stay plain.
        merged: an adapter was merged before quantization; otherwise it stands beside the quantized base.
        dtype: what the weights were cast to before they were quantized (the engine's `plain_dtype`).
        overrides: published tensors that differ from the learner's own (perturbed norms), by parameter name.
        head: True when the output embedding is quantized too.
        jitter: relative error, of random sign, of what each decoder layer reads. Half the spacing of a dtype
            (2⁻⁸ for bf16) is what rounding there does, and so the least by which two implementations differ.
    """
    own = dict(network.named_parameters())
    altered = {name: tensor.to(own[name]) for name, tensor in (overrides or {}).items()}
    ids = torch.tensor([list(sequence) for sequence in tokens], device=next(network.parameters()).device)
    computing = computing_as(network, format, exclude, merged, dtype, head)
    with evaluating(network), computing, _jittered(network, jitter):
        made = functional_call(network, altered, kwargs={"input_ids": ids, "use_cache": False})
    logits = made.logits[:, :-1].float()
    scores = logits.log_softmax(dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return list(scores.cpu())


@contextmanager
def _jittered(network: Any, size: float) -> Iterator[None]:
    """Multiply the inputs of all decoder layers by 1 ± `size`."""
    if size == 0:
        yield
        return
    generator = torch.Generator().manual_seed(0)

    def disturb(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = arguments[0]
        signs = 2.0 * torch.randint(2, hidden.shape, generator=generator).to(hidden.device) - 1.0
        return (hidden.float() * (1 + size * signs)).to(hidden), *arguments[1:]

    layers = [module for module in network.modules() if isinstance(module, GradientCheckpointingLayer)]
    handles = [layer.register_forward_pre_hook(disturb) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def computing_as(
    network: nn.Module,
    format: NumberFormat | None,
    exclude: Collection[str] = (),
    merged: bool = True,
    dtype: torch.dtype | None = None,
    head: bool = False,
) -> Iterator[None]:
    """Make the quantizable layers compute in `format`, each quantizing its weight in passing: no copy is kept."""
    if format is None:
        yield
        return
    layers: dict[str, nn.Module] = dict(quantizable_linears(network, exclude, head))
    modules = {name: base_of(module) for name, module in checkpoint_modules(network)}
    stacks = {modules[name]: stack for name, stack in expert_stacks(network, exclude).items()}
    if merged:
        layers = {name: module for name, module in checkpoint_modules(network) if name in layers}
    with ExitStack() as hooks:
        for members in fused_groups(layers).values():
            group = {name: layers[name] for name in members}
            for name, module in group.items():
                hooks.enter_context(module.register_forward_hook(_linear(name, group, format, dtype)))
        for module, stack in stacks.items():
            hooks.enter_context(module.register_forward_hook(_experts(stack, format, dtype)))
        yield


def _linear(name: str, group: Mapping[str, nn.Module], format: NumberFormat, dtype: torch.dtype | None) -> Any:
    """Return a hook whose output stands for a layer's own."""

    def forward(layer: nn.Module, given: tuple[Any, ...], own: Any) -> Tensor:
        x, shared = given[0], None
        if format.shares_amax and len(group) > 1:
            shared = shared_amax({key: _weight(module, dtype) for key, module in group.items()})
        module, x = group[name], autocast_input(x)
        return format.linear(x, format.quantize(_weight(module, dtype), shared), base_of(module).bias)

    return forward


def _experts(stack: ExpertStack, format: NumberFormat, dtype: torch.dtype | None) -> Any:
    def multiply(module: Any, expert: int, matrix: str, rows: Tensor) -> list[Tensor]:
        one = getattr(module, matrix).detach()[expert].to(dtype)  # of an adapter the sum, while its layer computes
        parts = dict(zip(stack.parts[matrix], stack.parts_of(matrix, one), strict=True))
        shared = shared_amax(parts) if format.shares_amax and len(parts) > 1 else None
        made = [format.quantize(part.contiguous(), shared) for part in parts.values()]
        return [format.linear(autocast_input(rows), q) for q in made]

    def forward(module: Any, given: tuple[Any, ...], own: Any) -> Tensor:
        return experts_output(stack, module, one_after_another(partial(multiply, module)), *given)

    return forward


def _weight(module: Any, dtype: torch.dtype | None) -> Tensor:
    return (merged_tensors(module)["weight"] if is_adapted(module) else module.weight.detach()).to(dtype)
