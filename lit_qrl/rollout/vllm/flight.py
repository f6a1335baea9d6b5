"""New weights between two steps of a vLLM engine, while its requests are under way.

vLLM's own pause with `keep` stands still between two steps, too; here the caller steps, so not stepping is the pause.
"""

from typing import Any

from lit_qrl.errors import ConfigError
from lit_qrl.rollout.engine import RolloutEngine, SamplerSpec
from lit_qrl.rollout.vllm.cache_scales import quantized


class Flight:
    """Lets weights in between two steps, and remembers how many tokens each request had drawn when they came.

    Args:
        engine: whose `between_steps` may publish.
        recompute: requests compute their keys and values again, instead of keeping them.
    """

    def __init__(self, engine: RolloutEngine, recompute: bool) -> None:
        self.engine, self.recompute = engine, recompute
        self.strays: dict[int, Any] = {}
        """Outputs of requests that ended while something else was asked of an engine that stood still."""
        self.stale = False
        """True while prompts' keys and values of earlier weights may be found in the cache."""
        self._came: dict[int, list[tuple[int, int]]] = {}
        self._began = -1

    def begin(self) -> None:
        """Begin a call, of which no request has drawn anything."""
        self._began = self.engine.version
        self._came.clear()
        self.strays.clear()

    def between(self) -> None:
        """Let weights in."""
        if self.engine.between_steps is not None:
            self.engine.between_steps()

    def came(self, llm: Any, version: int) -> bool | None:
        """Note new weights; return whether no key or value of the old ones is left, None where no request runs.

        Args:
            llm: the engine.
            version: of the weights.
        """
        under_way = unfinished(llm)
        if not under_way:
            return None
        for number, drawn in under_way.items():
            self._came.setdefault(number, []).append((drawn, version))
        self.stale = not self.recompute
        return bool(llm.reset_prefix_cache(reset_running_requests=True)) if self.recompute else True

    def versions(self, number: int, tokens: int) -> list[int]:
        """Return which weights drew each token of a request.

        Args:
            number: of the request.
            tokens: that it drew.
        """
        versions = [self._began] * tokens
        for drawn, version in self._came.get(number, ()):
            versions[drawn:] = [version] * (tokens - drawn)
        return versions


def unfinished(llm: Any) -> dict[int, int]:
    """Return how many tokens each unfinished request has drawn, by its number."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return {
        int(name.split("-")[0]): request.num_output_tokens
        for name, request in scheduler.requests.items()
        if not request.is_finished()
    }


def flight_of(engine: RolloutEngine, in_flight: str) -> Flight | None:
    """Return what lets weights in, or None where they come between two calls alone.

    Args:
        engine: that draws.
        in_flight: of its spec.
    """
    return None if in_flight == "none" else Flight(engine, in_flight == "recompute")


def check(spec: SamplerSpec, cache_dtype: str, speculative: bool) -> None:
    """Raise `ConfigError` for what is not known to be right when weights come between two steps.

    Args:
        spec: of the run's sampler.
        cache_dtype: of keys and values.
        speculative: tokens are proposed, so that a step draws several.
    """
    if spec.in_flight == "none":
        return
    for asked, name, remedy in (
        (spec.routes, "a run that records its experts", "Leave out RouterReplay"),
        (spec.adapter is not None, "an adapter apart from its base", "Set publisher.lora to merged"),
        (quantized(cache_dtype), f"kv_cache_dtype: {cache_dtype}", "Leave out data.engine.kv_cache_dtype"),
        (speculative, "tokens that are proposed", "Leave out data.engine.speculative"),
    ):
        if asked:
            raise ConfigError(
                "data.in_flight_updates gives VLLMEngine weights between two of its steps.",
                expected="experts that are not recorded, merged adapters, a KV cache in the model's dtype, and one "
                "token a step",
                given=name,
                remedy=f"{remedy}, or data.in_flight_updates.",
            )
