"""Whose streams a run's publishes are made of, and whether the format fits them."""

from collections.abc import Sequence
from typing import Any

from lit_qrl.formats.base import NumberFormat
from lit_qrl.formats.dense import Dense
from lit_qrl.network.head import check_head
from lit_qrl.network.linears import check_quantizable
from lit_qrl.precision.base import check_shapes
from lit_qrl.precision.source import PublishingPrecision, WeightSource


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
    if isinstance(plugin, PublishingPrecision):
        source = plugin.source(policy, format, exclude, head)
    else:
        source = WeightSource(policy, format, exclude, head)
    _check(source)
    return source


def trained_source(policy: Any, plugin: Any) -> WeightSource | None:
    """Return what the policy that is trained is made of where its plugin trains it in a format, else None.

    Args:
        policy: as `WeightSource` takes it.
        plugin: the Trainer's precision plugin.
    """
    if isinstance(plugin, PublishingPrecision) and plugin.trains_format:
        return plugin.source(policy, plugin.format)
    return None


def _check(source: WeightSource) -> None:
    if source.format is None or isinstance(source.format, Dense) or source.aligned:  # the plugin checked its own layers
        return
    if source.head:
        check_head(source.policy.network)
    check_quantizable(source.policy.network, source.format.name, source.exclude)
    check_shapes(source.format, source.shapes(), "publisher.exclude", source.exclude)
