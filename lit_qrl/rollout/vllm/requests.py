"""Requests to an in-process vLLM engine: how they are written, run to their end, and read."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_qrl.errors import StoppedError
from lit_qrl.network.routing import route_dtype, routers, unrouted
from lit_qrl.rollout.engine import EngineDiedError
from lit_qrl.rollout.vllm.adapter import request
from lit_qrl.rollout.vllm.patches import ALL
from lit_qrl.rollout.vllm.watchdog import Watchdog
from lit_qrl.seeding import derive_seed
from lit_qrl.types import Completion, SamplingParams


@dataclass(frozen=True, slots=True)
class Asked:
    """A request.

    Args:
        key: by which its answer comes back.
        tokens: of the prompt, or of a given sequence.
        sampling: how its completion is drawn; None asks for the log-probs of the given tokens.
        seed: of its own generator.
        group: requests of one are drawn by the same server, which then has their prefix.
        records: ask for the ids among which each token was drawn, too.
    """

    key: int
    tokens: Sequence[int]
    sampling: SamplingParams | None = None
    seed: int = 0
    group: int = 0
    records: bool = False


More = Callable[[bool], Sequence[Asked] | None]

# vLLM's samplers take the seed as a signed 32-bit number on some devices.
SEED_RANGE = 2**31


SCORING = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
"""vLLM's parameters for the log-probs of a given sequence; one token must be drawn, and is dropped."""


def options_of(asked: Asked) -> dict[str, Any]:
    """Return vLLM's parameters of a request: for a completion processed log-probs of the drawn tokens alone."""
    sampling = asked.sampling
    if sampling is None:
        return SCORING
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": [] if sampling.ignore_stop else list(sampling.stop_token_ids),
        "ignore_eos": True,  # what ends a completion is in stop_token_ids alone
        "logprobs": 0,
        "detokenize": False,
        "seed": asked.seed,
    }


def params_of(asked: Asked) -> Any:
    """Return them as vLLM takes them in this process, where it can also say what else could have been drawn."""
    from vllm.sampling_params import SamplingParams as VLLMSamplingParams

    here = {} if asked.sampling is None else {"logprobs": ALL if asked.records else 0, "flat_logprobs": True}
    return VLLMSamplingParams(**{**options_of(asked), **here})


def request_seed(seed: int, row: int, sample: int) -> int:
    """Return the seed of one completion.

    >>> request_seed(0, 1, 0) != request_seed(0, 0, 1)
    True
    """
    return derive_seed(seed, row, sample) % SEED_RANGE


def by_length(prompts: Sequence[Sequence[int]], n: int) -> list[int]:
    """Return the order of the `n` completions of each prompt: long prompts first, a group's members together.

    Prefill batches are then full and even, and a group's prompt is found in the prefix cache.

    >>> by_length([[1], [1, 2, 3]], n=2)
    [2, 3, 0, 1]
    """
    return sorted(range(len(prompts) * n), key=lambda i: (-len(prompts[i // n]), i))


def check_lengths(prompts: Sequence[Sequence[int]], max_tokens: int, limit: int) -> None:
    """Raise `ValueError` for a request that is longer than the engine was built for."""
    longest = max((len(prompt) + max_tokens for prompt in prompts), default=0)
    if longest > limit or not all(len(prompt) for prompt in prompts):
        raise ValueError(
            f"A request does not fit the engine. Expected: 1 to {limit} tokens, prompt and completion together. "
            f"Given: {longest if longest > limit else 'an empty prompt'}. Raise data.engine.max_model_len."
        )


def at_once(batch: Sequence[Asked]) -> More:
    """Return what gives a batch when it is asked for more the first time, and then None."""
    left = [batch]
    return lambda under_way: left.pop() if left else None


def run(
    llm: Any, more: More, take: Callable[[list[tuple[Asked, Any]]], None], adapter: bool, watchdog: Watchdog
) -> None:
    """Draw requests until no more come, with a look at the clock after each step.

    Args:
        llm: the engine.
        more: returns the requests that came since, or None where none will come any more; it is told whether some are
            under way, and may wait where none is.
        take: called after a step in which some ended, with those and vLLM's outputs.
        adapter: draw through the published adapter.
        watchdog: of the steps.

    Raises:
        EngineDiedError: when vLLM fails, or a step takes longer than the watchdog allows.
    """
    under_way: dict[int, Asked] = {}
    lora = request() if adapter else None
    given: list[str] = []
    try:
        with watchdog:
            while (asked := more(bool(under_way))) is not None or under_way:
                watchdog.beat()
                if asked:
                    inputs: list[Any] = [{"prompt_token_ids": list(one.tokens)} for one in asked]
                    ids = llm.enqueue(inputs, [params_of(one) for one in asked], use_tqdm=False, lora_request=lora)
                    given += ids
                    under_way |= {_number(name): one for name, one in zip(ids, asked, strict=True)}
                if not under_way:
                    continue
                if not llm.llm_engine.has_unfinished_requests():
                    raise RuntimeError(f"it has lost {len(under_way)} requests")
                finished = [output for output in llm.llm_engine.step() if output.finished]
                if finished:
                    take([(under_way.pop(_number(output.request_id)), output) for output in finished])
    except (KeyboardInterrupt, SystemExit, StoppedError):
        llm.llm_engine.abort_request(given)
        raise
    except Exception as error:
        raise EngineDiedError(f"vLLM failed while generating: {type(error).__name__}: {error}") from error


def _number(name: str) -> int:
    """The ids come back as they were given, or with a suffix; both count up in the order of submission."""
    return int(name.split("-")[0])


@dataclass(frozen=True)
class Routed:
    """How the experts that vLLM reports for a token are those of the learner's routers.

    Args:
        layers: numbers of the layers that have experts.
        experts: to choose from in each.
        chosen: by each token.
    """

    layers: tuple[int, ...]
    experts: int
    chosen: int

    def of(self, output: Any) -> Tensor | None:
        """Return "tokens layers k" for prompt and completion of a request, or None where nothing came.

        A token that chose one expert twice was not recorded, and the last is not computed: both are `unrouted`.
        """
        drawn = output.outputs[0]
        given = getattr(drawn, "routed_experts", None)
        if given is None:
            return None
        dtype = route_dtype(self.experts)
        known = np.asarray(given)
        if self.layers != tuple(range(known.shape[1])):
            known = known[:, list(self.layers)]
        tokens = len(output.prompt_token_ids) + len(drawn.token_ids)
        routes = torch.full((tokens, *known.shape[1:]), unrouted(dtype), dtype=dtype)
        filled = routes.numpy()[: min(len(known), tokens - 1)]
        filled[:] = known[: tokens - 1]  # in vLLM's own dtype until here: 200,000 numbers of each completion
        if known.shape[2] > 1:
            twice = (known[:, :, :1] == known[:, :, 1:]).all(axis=2).any(axis=1)
            filled[twice[: len(filled)]] = unrouted(dtype)
        return routes


def routed_layers(network: torch.nn.Module) -> Routed:
    """Return which layers of vLLM's hold the experts that the learner's routers choose from.

    >>> gate = torch.nn.Linear(4, 8)
    >>> gate.num_experts, gate.top_k = 8, 2
    >>> routed_layers(torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.ReLU(), gate])}))
    Routed(layers=(1,), experts=8, chosen=2)
    """
    found = routers(network)
    numbers = (next(int(part) for part in router.name.split(".") if part.isdecimal()) for router in found)
    return Routed(tuple(numbers), max(router.experts for router in found), found[0].chosen)


def kept_ids(logprobs: Any) -> tuple[list[float], list[Tensor]]:
    """Return the log-prob of each token, and the ids " k" among which it was drawn.

    Args:
        logprobs: vLLM's flat ones: of each token its own, then those of the likeliest words, at −∞ where it could not
            be one.

    >>> from types import SimpleNamespace
    >>> flat = SimpleNamespace(start_indices=[0], end_indices=[4])
    >>> flat.token_ids, flat.logprobs = [5, 9, 5, 2], [-1.2, -0.36, -1.2, -math.inf]
    >>> kept_ids(flat)
    ([-1.2], [tensor([9, 5], dtype=torch.int32)])
    """
    ids = torch.tensor(logprobs.token_ids, dtype=torch.int32)
    possible = torch.tensor(logprobs.logprobs) > -math.inf
    rows = list(zip(logprobs.start_indices, logprobs.end_indices, strict=True))
    kept = [ids[first + 1 : end][possible[first + 1 : end]] for first, end in rows]
    return [logprobs.logprobs[first] for first, _ in rows], kept


def answer(asked: Asked, output: Any, version: int, routed: Routed | None = None) -> Completion | Tensor:
    """Return the completion of a request, or the log-probs (fp32, T = 1) of its tokens after the first.

    Args:
        asked: the request.
        output: vLLM's.
        version: of the weights.
        routed: where the experts of its tokens were asked for.
    """
    if asked.sampling is None:
        rows = output.prompt_logprobs
        values = [rows[i][token].logprob for i, token in enumerate(asked.tokens) if i]
        return torch.tensor(values, dtype=torch.float32)
    drawn = output.outputs[0]
    logprobs, ids = kept_ids(drawn.logprobs) if asked.records else (list(drawn.logprobs.logprobs), None)
    return Completion(
        token_ids=list(drawn.token_ids),
        logprobs=logprobs,
        finish_reason="stop" if drawn.finish_reason == "stop" else "length",
        version=version,
        routed_experts=None if routed is None else routed.of(output),
        kept=ids,
    )
