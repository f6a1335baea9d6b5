"""What a decode step of the vLLM engine is made of: milliseconds with and without log-probs and seeds, kernels, host.

The section `steps` of `rollout.py`, which builds the engine. Steps are taken as a rollout takes them, one behind the
other: vLLM schedules the next one while the GPU computes, so that a step takes what the slower of the two does. Each
line is printed when it is measured.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

ARMS = {
    "as a rollout": (True, True),
    "no seeds": (False, True),
    "no log-probs": (True, False),
    "neither": (False, False),
}
"""Whether each request has a seed of its own, and whether the log-probs of drawn tokens are returned."""
ONE_BY_ONE = "seeds one by one"
"""The arm as a rollout was before `patches/request_noise.py`: the noise of each request by a launch of its own.

vLLM's runner of version 1 alone makes it so (mixtures of experts, proposed tokens): `VLLM_USE_V2_MODEL_RUNNER=0`."""
WARM, TIMED, PROFILED = 6, 40, 8
PARTS = {
    "schedule": ("engine_core.engine_core.scheduler", "schedule"),
    "launch": ("engine_core.engine_core.model_executor", "execute_model"),
    "sample": ("engine_core.engine_core.model_executor", "sample_tokens"),
    "take in": ("engine_core.engine_core.scheduler", "update_from_output"),
    "outputs": ("output_processor", "process_outputs"),
}
"""What vLLM's host does in a step: an object below its engine, and a method. The rest of a step it mostly waits."""
KINDS = {
    "attention": r"flash|attn|attention|reshape_and_cache|paged",
    "GEMM": r"gemm|nvjet|cutlass|marlin|machete|cublas|wgmma|splitk|s16816|scaled_mm|_product_kernel",
    "norms, activations, rotary, quantization": r"rms|norm|silu|gated|act_and_mul|rotary|quant",
    "sampling and log-probs": r"softmax|topk|top_k|sort|argmax|gumbel|exponential|distribution|gather|sample|logprob|"
    r"rank|temperature|penalt|greater|scatter|random|reduce|_part_kernel|_whole_kernel",
    "copies": r"memcpy|memset|copy",
}
"""By what the name of a kernel has in it, the first that fits."""
SHOWN = 18


def run(bench: Any, batches: list[int]) -> dict[str, Any]:
    """Return milliseconds of a step for each batch and arm, and the device's share of it by kind of kernel.

    Args:
        bench: with an engine that holds weights, for completions of 100 tokens at least.
        batches: sequences decoded at a time.
    """
    worker = bench.engine.llm.llm_engine.model_executor.driver_worker.worker
    second = bool(getattr(worker, "use_v2_model_runner", False))
    print(f"vLLM's runner of version {2 if second else 1}", flush=True)
    found: dict[str, Any] = {"runner": 2 if second else 1}
    for batch in batches:
        found[str(batch)] = figures = {}
        for arm, (seeds, logprobs) in ARMS.items():
            figures[arm], figures[f"host, {arm}"] = timed(bench, batch, seeds, logprobs)
            print(f"batch {batch}: {arm} {figures[arm]:.2f} ms, of it {figures[f'host, {arm}']}", flush=True)
        if not second:
            with _one_by_one():
                figures[ONE_BY_ONE], _ = timed(bench, batch, True, True)
            print(f"batch {batch}: {ONE_BY_ONE} {figures[ONE_BY_ONE]:.2f} ms", flush=True)
        figures["kernels"] = kernels = profiled(bench, batch)
        told = f"device {kernels['device']:.2f} ms a step, idle {kernels['idle']:.2f}, {kernels['launches']} launches"
        print(f"batch {batch}: {told}; {kernels['kinds']}")
        for row in kernels["top"]:
            print(f"{row[0]:9.3f} ms {row[1]:7.1f} calls  {row[2]}", flush=True)
    return found


def _begin(bench: Any, batch: int, seeds: bool, logprobs: bool) -> list[str]:
    """Put requests in and take the steps of their prefill and the first of decoding; return their names."""
    from lit_qrl.rollout.vllm import requests
    from lit_qrl.types import SamplingParams

    sampling = SamplingParams(max_tokens=bench.args.completion, ignore_stop=True)
    asked = [requests.Asked(i, (), sampling, requests.request_seed(7, i, 0)) for i in range(batch)]
    params = [requests.params_of(one) for one in asked]
    for one in params:
        one.seed, one.logprobs = one.seed if seeds else None, one.logprobs if logprobs else None
    llm = bench.engine.llm
    llm.reset_prefix_cache()
    inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in bench.prompts(batch, seed=batch)]
    names = llm.enqueue(inputs, params, use_tqdm=False, lora_request=bench.request())
    for _ in range(WARM + -(-batch * bench.args.prompt // 2048)):
        llm.llm_engine.step()
    return names


@contextmanager
def _one_by_one() -> Iterator[None]:
    """Let vLLM make the noise of requests with seeds by itself."""
    from vllm.v1.sample.ops import topk_topp_sampler as module

    ours = module.random_sample
    module.random_sample = getattr(ours, "lit_qrl_original", ours)
    try:
        yield
    finally:
        module.random_sample = ours


def timed(bench: Any, batch: int, seeds: bool, logprobs: bool) -> tuple[float, dict[str, float]]:
    """Return the mean milliseconds of steps in which all requests draw a token, and of what the host does in them."""
    from lit_qrl.rollout.vllm.process import kept_process_state

    engine = bench.engine.llm.llm_engine
    with kept_process_state():
        names = _begin(bench, batch, seeds, logprobs)
        bench.sync()
        with _watched(engine) as spent:
            start = time.perf_counter()
            for _ in range(TIMED):
                engine.step()
            bench.sync()
            seconds = time.perf_counter() - start
        _end(bench, names)
    return round(1e3 * seconds / TIMED, 3), {part: round(1e3 * own / TIMED, 2) for part, own in spent.items()}


@contextmanager
def _watched(engine: Any) -> Iterator[dict[str, float]]:
    """Yield the seconds that `PARTS` of an engine take, as they grow."""
    spent: dict[str, float] = {}
    owners = {}
    for part, (path, name) in PARTS.items():
        owner = reduce(getattr, path.split("."), engine)
        if hasattr(owner, name):
            owners[part], spent[part] = (owner, name), 0.0
            setattr(owner, name, _clocked(getattr(owner, name), spent, part))
    try:
        yield spent
    finally:
        for owner, name in owners.values():
            delattr(owner, name)


def _clocked(method: Callable[..., Any], spent: dict[str, float], part: str) -> Callable[..., Any]:
    def clocked(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            spent[part] += time.perf_counter() - start

    return clocked


def profiled(bench: Any, batch: int) -> dict[str, Any]:
    """Return the device's milliseconds of a step as a rollout takes it: by kind, between kernels, and the largest."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    from lit_qrl.rollout.vllm.process import kept_process_state

    on_gpu = bench.device == "cuda"
    with kept_process_state():
        names = _begin(bench, batch, True, True)
        bench.sync()
        # what the host does is timed elsewhere: to record it as well would slow it
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
            for _ in range(PROFILED):
                bench.engine.llm.llm_engine.step()
            bench.sync()
        _end(bench, names)
    events = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in found.events() or ()
        if event.device_type == DeviceType.CUDA
    ]
    return kernel_figures(events, PROFILED)


def kernel_figures(events: Sequence[tuple[float, float, str]], steps: int) -> dict[str, Any]:
    """Return milliseconds a step of kernels by kind, of what none ran in, and the kernels that took most.

    The output head is the product that takes longest, once a step.

    Args:
        events: start, end (microseconds) and name of each kernel.
        steps: that they belong to.
    """
    events = sorted(events)
    sums: dict[str, list[float]] = {}
    kinds: dict[str, float] = {}
    products = sorted((end - start for start, end, name in events if _kind(name) == "GEMM"), reverse=True)
    head = sum(products[:steps])
    for start, end, name in events:
        own = sums.setdefault(name, [0.0, 0])
        own[0], own[1] = own[0] + end - start, own[1] + 1
        kinds[_kind(name)] = kinds.get(_kind(name), 0.0) + end - start
    if products:
        kinds["GEMM"] -= head
        kinds["GEMM of the head"] = head
    idle, reached = 0.0, events[0][0] if events else 0.0
    for start, end, _ in events:
        idle, reached = idle + max(start - reached, 0.0), max(reached, end)
    span = reached - events[0][0] if events else 0.0
    top = sorted(((round(1e-3 * own / steps, 4), count / steps, name[:100]) for name, (own, count) in sums.items()))
    return {
        "device": round(1e-3 * (span - idle) / steps, 3),
        "idle": round(1e-3 * idle / steps, 3),
        "launches": round(len(events) / steps, 1),
        "kinds": {kind: round(1e-3 * own / steps, 3) for kind, own in sorted(kinds.items(), key=lambda one: -one[1])},
        "top": top[::-1][:SHOWN],
    }


def _kind(name: str) -> str:
    return next((kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE)), "other")


def _end(bench: Any, names: list[str]) -> None:
    engine = bench.engine.llm.llm_engine
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
