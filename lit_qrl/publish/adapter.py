"""Whether an adapter is published beside its base, and whether that can work."""

from typing import Any

from lit_qrl.errors import ConfigError
from lit_qrl.precision.packed_lora import PackedLoRA
from lit_qrl.rollout.embedded.adapter import check_separable
from lit_qrl.rollout.engine import RolloutEngine
from lit_qrl.rollout.vllm.adapter import check_adapter


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
    packed = isinstance(plugin, PackedLoRA) and aligned
    apart = lora == "adapter" or (lora == "auto" and packed)
    if packed and not apart and not unaligned:
        raise ConfigError(
            "The sum of a packed base and its adapter would be rounded once more, which the learner never sees.",
            expected="publisher.lora: adapter",
            given="merged",
            remedy="Set publisher.unaligned to true to study the mismatch.",
        )
    if isinstance(plugin, PackedLoRA) and plugin.share_weights:
        if not (packed and apart):
            raise ConfigError(
                "share_weights needs the plugin's own base in the engine, and the adapter beside it.",
                expected="publisher.format: auto and publisher.lora: auto",
                given=f"publisher.lora: {lora}",
            )
        engine.check_sharing(plugin.format)
    if not apart:
        return False
    if config is None and lora == "auto":
        return False  # NVFP4LoRA refuses to be without an adapter, and says how to give one
    if config is None:
        raise ConfigError(
            "The policy has no adapter to publish.",
            expected="model.policy.lora",
            given="publisher.lora: adapter",
            remedy="Give the policy an adapter, or leave publisher.lora at auto.",
        )
    check_separable(config)
    if type(engine).load_adapter is RolloutEngine.load_adapter:
        raise ConfigError(f"{type(engine).__name__} cannot load adapters.", remedy="Set publisher.lora to merged.")
    limit = getattr(engine, "max_lora_rank", None)
    if limit == 0:
        raise ConfigError(
            "The engine would be built without room for an adapter.",
            expected=f"data.engine.max_lora_rank of at least {config.r}",
            given=0,
            remedy="Set it, or set publisher.lora to merged.",
        )
    if limit is not None:
        check_adapter(config, limit)
    return True
