"""From the publisher's arguments to what the engine is told before it starts."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CUDAAccelerator

from lit_qrl.diffusion_policy import DiffusionPolicy
from lit_qrl.errors import ConfigError
from lit_qrl.formats.base import NumberFormat
from lit_qrl.formats.dense import Dense, MultipliedOut
from lit_qrl.formats.support import row_of
from lit_qrl.loop.contracts import Learner
from lit_qrl.loop.correction import needs_kept
from lit_qrl.loop.routing import replayed_level
from lit_qrl.loop.schedule import RolloutPrefetcher
from lit_qrl.network.adapters import check_fits, check_separable
from lit_qrl.network.head import check_head, tied_head
from lit_qrl.network.linears import check_quantizable
from lit_qrl.network.structure import outline_of
from lit_qrl.policy import CausalPolicy
from lit_qrl.precision.base import QuantizedPrecision, check_layers, check_shapes
from lit_qrl.precision.source import WeightSource
from lit_qrl.rollout.engine import Learners, LendsWeights, RolloutEngine, SamplerSpec, Scores, TakesAdapter
from lit_qrl.strategies.colocated import check_phases

log = logging.getLogger(__name__)


def sampler_spec(settings: Any, learner: Learner, on_hang: Callable[[str], None]) -> SamplerSpec:
    """Return the spec of a run's sampler, checked against precision plugin, policy, strategy and engine.

    Args:
        settings: the `WeightPublisher`, whose arguments say what is published; a `format` of None is `auto`.
        learner: with policy, data module and Trainer; no weight need be loaded.
        on_hang: of the spec.

    Raises:
        ConfigError: for what cannot be published, or the engine cannot hold.
    """
    plugin, policy, data = learner.trainer.precision_plugin, learner.policy, learner.data
    engine: RolloutEngine = data.engine
    publishes = isinstance(plugin, QuantizedPrecision)
    aligned = plugin.format if publishes else None
    if settings.format is not None and aligned is not None and settings.format != aligned and not settings.unaligned:
        raise ConfigError(
            "The sampler's format differs from the one that the learner computes in.",
            expected=f"publisher.format: auto (the plugin's {aligned.name})",
            given=settings.format.name,
            remedy="Set publisher.unaligned to true to study the mismatch.",
        )
    _check_kind(policy, engine)
    format = settings.format if settings.format is not None else aligned
    same = aligned is not None and format == aligned
    if same and settings.exclude:
        raise ConfigError(
            "The precision plugin says which layers are quantized, and the publisher too.",
            given=f"publisher.exclude: {', '.join(settings.exclude)}",
            remedy="Move the patterns to the plugin's exclude.",
        )
    if settings.quantize_head and (same or format is None or isinstance(format, Dense)):
        raise ConfigError(
            "publisher.quantize_head has no format of its own to quantize to.",
            expected="publisher.format of 8 or 4 bits, beside a learner that computes the head in full precision",
            given=type(plugin).__name__ if same else "auto" if format is None else format.name,
            remedy="Choose another format, such as fp8_row, or set quantize_head to false.",
        )
    if settings.quantize_head and policy.config.get_text_config().tie_word_embeddings:
        raise tied_head(policy.config)  # before the weights are loaded
    if engine.batch_invariant:
        _check_same_arithmetic(settings, format, aligned, learner)
    apart = published_apart(settings.lora, policy.lora, engine, plugin, same, settings.unaligned)
    if settings.every_n_iterations > 1 and isinstance(data.schedule, RolloutPrefetcher):
        raise ConfigError(
            "data.schedule says when weights are published, and the publisher too.",
            expected="publisher.every_n_iterations: 1",
            given=settings.every_n_iterations,
            remedy="Leave it out; data.max_staleness is how old weights may be.",
        )
    check_phases(learner.trainer, engine, settings.every_n_iterations)
    if (
        settings.evaluation_format == "learner"
        and engine.single_format
        and not (format is None or isinstance(format, Dense))
    ):
        log.warning("%s holds %s alone, so evaluations are in it.", type(engine).__name__, format.name)
    if settings.probe_every and not isinstance(engine, Scores):
        log.info("%s cannot score given tokens, so no probe compares it with the learner.", type(engine).__name__)
    if apart:
        make_room(engine, policy.lora)
    if engine.batch_invariant and engine.kernels == "vllm":
        format = in_one_order(format)
    spec = SamplerSpec(
        sampling=data.sampling,
        format=format,
        aligned=same,
        exclude=plugin.exclude if publishes and same else settings.exclude,
        quantize_head=settings.quantize_head,
        compute_dtype=compute_dtype(learner.trainer),
        head_dtype=policy.head_dtype,
        adapter=policy.lora if apart else None,
        prompt_limit=data.max_prompt_tokens,
        sequence_limit=data.longest_evaluation,
        evaluation_limits=data.evaluation_limits,
        decode_steps=max(learner.trainer.max_epochs or 0, 0) * data.sampling.max_tokens,
        estimator=policy.estimator if isinstance(policy, DiffusionPolicy) else None,
        outlives_update=settings.every_n_iterations > 1,
        routes=replayed_level(learner.trainer) == "rollout",
        kept=needs_kept(learner),
        in_flight=data.in_flight_updates,
        learners=learners(learner.trainer),
        on_hang=on_hang,
    )
    engine.validate(spec)
    _check_model(learner.policy, spec, engine, same)
    return spec


def compute_dtype(trainer: Trainer) -> torch.dtype | None:
    """Return what the learner's products are computed in where it is not its weights' own dtype, else None."""
    plugin, parts = trainer.precision_plugin, getattr(trainer.strategy, "compute_dtype", None)
    if parts == "bf16" or getattr(plugin, "autocast", "none") == "bf16" or plugin.precision == "bf16-mixed":
        return torch.bfloat16
    return torch.float16 if plugin.precision == "16-mixed" else None


def in_one_order(format: NumberFormat | None) -> NumberFormat | None:
    """Return what a batch-invariant vLLM holds in a format's place.

    Its kernels for low-bit weights alone add in an order that depends on the batch. A learner multiplies those out, and
    so goes out what it multiplies by.

    Args:
        format: of the learner's and the sampler's layers.
    """
    if format is None or format.quantizes_activations or not row_of(format).vllm_varies:
        return format
    log.info(
        "data.engine.batch_invariant: weights in %s go to vLLM multiplied out, in bf16, since no kernel of its own "
        "multiplies them in one order. The numbers are the same; they take 16 bits each there, and bf16's time.",
        format.name,
    )
    return MultipliedOut(format)


def _check_same_arithmetic(
    settings: Any, format: NumberFormat | None, aligned: NumberFormat | None, learner: Learner
) -> None:
    """Raise `ConfigError` where learner and sampler multiply differently, so that no kernel could make them equal."""
    plugin = learner.trainer.precision_plugin
    kernel = getattr(getattr(plugin, "choice", None), "kernel", None)
    for differs, given, remedy in (
        (
            format != aligned and (aligned is not None or format is None or format.name != learner.policy.dtype),
            f"publisher.format: {format and format.name}",
            _remedy_of_format(format),
        ),
        (
            learner.policy.lora is not None and learner.data.engine.kernels != "vllm",
            "model.policy.lora",
            "Train all weights, or take VLLMEngine.",
        ),
        (settings.unaligned, "publisher.unaligned: true", "Leave it out."),
        (
            isinstance(plugin, QuantizedPrecision) and plugin.share_weights,
            "share_weights of the precision plugin",
            "Set it to false: vLLM's kernel for what it shares is another than the learner's.",
        ),
        ("mixed" in str(plugin.precision), f"trainer.precision: {plugin.precision}", "Choose 32-true or bf16-true."),
        (getattr(plugin, "autocast", "none") != "none", "autocast of the precision plugin", "Set it to none."),
        (settings.quantize_head, "publisher.quantize_head", "Set it to false."),
        (
            learner.data.engine.kernels == "vllm" and kernel not in (None, "auto"),
            f"kernel: {kernel} of the precision plugin",
            "Set it to auto, which takes the sampler's.",
        ),
        (
            learner.data.engine.kernels == "vllm" and learner.policy.head_dtype is not None,
            "model.policy.head_dtype: fp32",
            "Leave it out.",
        ),
    ):
        if differs:
            raise ConfigError(
                "data.engine.batch_invariant makes learner and sampler equal, which compute differently in this run.",
                expected="one arithmetic for both: plain weights, or a plugin whose format is published",
                given=given,
                remedy=f"{remedy} Or set batch_invariant to false.",
            )


def _remedy_of_format(format: NumberFormat | None) -> str:
    if format is None or isinstance(format, Dense):
        return "Leave publisher.format out; model.policy.dtype says what both compute in."
    return f"Add QATAligned(weights: {format.name}) to trainer.plugins, or leave publisher.format out."


def _check_kind(policy: CausalPolicy, engine: RolloutEngine) -> None:
    """Raise `ConfigError` for a masked-diffusion policy in an engine of causal models, or the reverse."""
    if policy.denoises != engine.denoises:
        ways = ("draws from left to right", "fills in masks")
        raise ConfigError(
            f"{type(engine).__name__} {ways[engine.denoises]}, and {type(policy).__name__} {ways[policy.denoises]}.",
            expected="DiffusionEngine for DiffusionPolicy, with a masked-diffusion model, or neither",
            given=f"data.engine: {type(engine).__name__}, model.policy: {type(policy).__name__}",
            remedy=f"Take {'DiffusionEngine' if policy.denoises else 'VLLMEngine or TransformersEngine'}.",
        )


def _check_model(policy: Any, spec: SamplerSpec, engine: RolloutEngine, same: bool) -> None:
    """Raise `ConfigError` for a model that format, adapter or engine cannot take, before its weights are loaded.

    Args:
        policy: of the run.
        spec: of the sampler.
        engine: that holds it.
        same: the format is the precision plugin's, which checks its layers itself.
    """
    network = outline_of(policy)
    if spec.format is not None and not isinstance(spec.format, Dense) and not same:
        check_layers(network, spec.format, spec.exclude, "publisher.exclude", spec.quantize_head)
    engine.check_model(network)
    if policy.model is None:
        check_fits(network, policy.lora, policy.source)


def source_of(
    policy: Any, plugin: Any, format: NumberFormat | None, exclude: Sequence[str] = (), head: bool = False
) -> WeightSource:
    """Return what the publishes of a policy in `format` are made of: what its precision plugin says, if it says so.

    Args:
        policy: as `WeightSource` takes it.
        plugin: the Trainer's precision plugin.
        format: of the sampler's linear layers, or None.
        exclude: name patterns of layers that stay plain, where the plugin does not say.
        head: publish the output head in the format too.

    Raises:
        ConfigError: where the format applies to no layer, or does not fit one.
    """
    if isinstance(plugin, QuantizedPrecision):
        source = plugin.source(policy, format, exclude, head)
    else:
        source = WeightSource(policy, format, exclude, head)
    if format is not None and not isinstance(format, Dense) and not source.aligned:  # a plugin checks its own layers
        if source.head:
            check_head(policy.network)
        check_quantizable(policy.network, format.name, source.exclude)
        check_shapes(format, source.shapes, "publisher.exclude", source.exclude)
    return source


def trained_source(policy: Any, plugin: Any) -> WeightSource | None:
    """Return what the policy that is trained is made of where its plugin trains it in a format, else None.

    Args:
        policy: as `WeightSource` takes it.
        plugin: the Trainer's precision plugin.
    """
    if isinstance(plugin, QuantizedPrecision) and plugin.trains_format:
        return plugin.source(policy, plugin.format)
    return None


def published_apart(lora: str, config: Any, engine: RolloutEngine, plugin: Any, aligned: bool, unaligned: bool) -> bool:
    """Return whether the adapter goes out beside its base instead of merged into it.

    Args:
        lora: `publisher.lora`.
        config: the policy's PEFT config, or None.
        engine: what receives it.
        plugin: the Trainer's precision plugin.
        aligned: True when the sampler's format is the plugin's.
        unaligned: `publisher.unaligned`.

    Raises:
        ConfigError: for an adapter that policy, engine or plugin cannot hold that way.
    """
    ours = plugin if isinstance(plugin, QuantizedPrecision) else None
    packed = ours is not None and ours.packs_base and aligned
    apart = lora == "adapter" or (lora == "auto" and packed)
    if packed and not apart and not unaligned:
        raise ConfigError(
            "The sum of a packed base and its adapter would be rounded once more, which the learner never sees.",
            expected="publisher.lora: adapter",
            given="merged",
            remedy="Set publisher.unaligned to true to study the mismatch.",
        )
    if ours is not None and ours.share_weights:
        if not (packed and apart):
            raise ConfigError(
                "share_weights needs the plugin's own base in the engine, and the adapter beside it.",
                expected="publisher.format: auto and publisher.lora: auto",
                given=f"publisher.lora: {lora}",
            )
        if not isinstance(engine, LendsWeights):
            raise ConfigError(
                f"{type(engine).__name__} keeps no weights that a learner could share.",
                expected="VLLMEngine on CUDA with nvfp4",
                remedy="Set share_weights to false.",
            )
        engine.check_sharing(ours.format)
    if not apart:
        return False
    if config is None and lora == "auto":
        return False  # a plugin that packs refuses to be without an adapter, and says how to give one
    if config is None:
        raise ConfigError(
            "The policy has no adapter to publish.",
            expected="model.policy.lora",
            given="publisher.lora: adapter",
            remedy="Give the policy an adapter, or leave publisher.lora at auto.",
        )
    check_separable(config)
    if not isinstance(engine, TakesAdapter):
        raise ConfigError(f"{type(engine).__name__} cannot load adapters.", remedy="Set publisher.lora to merged.")
    return True


def make_room(engine: RolloutEngine, config: Any) -> None:
    """Give an engine that is built with room for adapters, and was given none, room for that of a PEFT config."""
    if engine.max_lora_rank != 0:
        return
    from lit_qrl.rollout.vllm.checks import LORA_RANKS

    engine.max_lora_rank = next((room for room in LORA_RANKS if room >= config.r), config.r)
    log.info("The engine gets room for adapters of rank %d (data.engine.max_lora_rank).", engine.max_lora_rank)


def learners(trainer: Trainer) -> Learners:
    """Return what an engine is told of the learner's processes, so that it takes other GPUs than theirs.

    Args:
        trainer: whose strategy has its devices.
    """
    size = max(trainer.world_size // max(trainer.num_nodes, 1), 1)
    return Learners(
        devices=tuple(trainer.device_ids) if isinstance(trainer.accelerator, CUDAAccelerator) else (),
        local=(trainer.local_rank, size),
        whole=(trainer.global_rank, trainer.world_size),
    )
