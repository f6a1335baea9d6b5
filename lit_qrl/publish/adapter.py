"""An adapter published beside its base: whether that can work, and what goes out then."""

from typing import Any

from lit_qrl.errors import ConfigError
from lit_qrl.network.adapters import check_separable
from lit_qrl.precision.source import Change, PublishingPrecision, WeightSource
from lit_qrl.publish.delivery import Delivery
from lit_qrl.receipts.ledger import PublishReport
from lit_qrl.rollout.engine import LendsWeights, RolloutEngine, TakesAdapter


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
    ours = plugin if isinstance(plugin, PublishingPrecision) else None
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


class AdapterBeside:
    """Publishes a base once, and from then on what differs from it: norms that callbacks change, and the adapter.

    Args:
        source: of the run's weights.
        delivery: to the engine.
    """

    def __init__(self, source: WeightSource, delivery: Delivery) -> None:
        self.source, self.delivery = source, delivery
        # What the engine holds: the base's state and layers, and which norms differ from it.
        self._base: tuple[Any, PublishReport] | None = None
        self._perturbed: set[str] = set()

    def forget(self) -> None:
        """Send the base again at the next publish, whatever the engine holds."""
        self._base = None

    def publish(self, change: Change, version: int) -> PublishReport:
        """Publish the base where the engine does not hold it, then what differs; return the report of all.

        Args:
            change: of the norms.
            version: of the publish.
        """
        source, engine = self.source, self.delivery.engine
        dtype, sent = source.plain_dtype(engine.plain_dtype), 0
        state = source.base_state()
        if self._base is None or self._base[0] != state:
            self._base, self._perturbed = None, set()
            report = self.delivery.weights(source.base(dtype), source.format, source.shapes(), version)
            if isinstance(engine, LendsWeights):
                source.settle(engine)
            self._base, sent = (source.base_state(), report), report.bytes
        changed = source.changed_norms(change)
        restored = source.norms(self._perturbed - changed.keys())
        if changed or restored:
            norms = ((name, tensor.to(dtype)) for name, tensor in {**restored, **changed}.items())
            self._perturbed |= changed.keys()
            sent += self.delivery.part("norms", norms, version).bytes
            self._perturbed = set(changed)
        report = self.delivery.part("adapter", source.adapter(engine.plain_dtype), version)
        base = self._base[1]
        report.layers, report.sizes = {**base.layers, **report.layers}, base.sizes
        report.quantized_share, report.verified_share = base.quantized_share, base.verified_share
        report.bytes += sent
        return report
