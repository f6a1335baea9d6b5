"""What a decode step of the vLLM engine is made of: seconds with and without log-probs and seeds, kernels, host.

The section `steps` of `rollout.py`, which builds the engine.
"""

import re
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ARMS = {
    "as a rollout": (True, True),
    "no seeds": (False, True),
    "no log-probs": (True, False),
    "neither": (False, False),
}
"""Whether each request has a seed of its own, and whether the log-probs of drawn tokens are returned."""
ONE_BY_ONE = "seeds one by one"
"""The arm as a rollout was before `patches/request_noise.py`: the noise of each request by a launch of its own."""
WARM, TIMED, PROFILED = 6, 16, 4
KINDS = {
    "attention": r"flash|attn|attention|reshape_and_cache|paged",
    "GEMM": r"gemm|nvjet|cutlass|marlin|machete|cublas|wgmma|splitk|s16816",
    "norms, activations, rotary, quantization": r"rms|norm|silu|act_and_mul|rotary|quant",
    "sampling and log-probs": r"softmax|topk|top_k|sort|argmax|gumbel|exponential|distribution|gather|sample|logprob|"
    r"rank|temperature|penalt|greater|scatter|random|reduce",
    "copies": r"memcpy|memset|copy",
}
"""By what the name of a kernel has in it, the first that fits."""
SHOWN = 14


def run(bench: Any, batches: list[int]) -> dict[str, Any]:
    """Return milliseconds of a step for each batch and arm, and the device's share of it by kind of kernel.

    Args:
        bench: with an engine that holds weights.
        batches: sequences decoded at a time.
    """
    found: dict[str, Any] = {}
    for batch in batches:
        found[str(batch)] = figures = {}
        for arm, (seeds, logprobs) in ARMS.items():
            figures[arm] = timed(bench, batch, seeds, logprobs)
        with _one_by_one():
            figures[ONE_BY_ONE] = timed(bench, batch, True, True)
        figures["kernels"] = profiled(bench, batch)
        plain, kernels = figures["as a rollout"], figures["kernels"]
        figures["host"] = round(max(plain - kernels["device"], 0.0), 3)
        print(f"batch {batch}: " + ", ".join(f"{arm} {figures[arm]:.2f} ms" for arm in (*ARMS, ONE_BY_ONE)), flush=True)
        print(f"  device {kernels['device']:.2f} ms a step, the rest {figures['host']:.2f}; {kernels['kinds']}")
        for row in kernels["top"]:
            print(f"{row[0]:9.3f} ms {row[1]:7.1f} calls  {row[2]}", flush=True)
    return found


def _begin(bench: Any, batch: int, seeds: bool, logprobs: bool) -> list[str]:
    """Put requests in and take the steps of their prefill and the first of decoding; return their names."""
    from lit_qrl.rollout.vllm import requests
    from lit_qrl.types import SamplingParams

    sampling = SamplingParams(max_tokens=4 * (WARM + TIMED + PROFILED) + 64, ignore_stop=True)
    params = requests.drawings(sampling, [(i, 0) for i in range(batch)], 7 if seeds else None)
    if not logprobs:
        for one in params:
            one.logprobs = None
    llm = bench.engine.llm
    llm.reset_prefix_cache()
    inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in bench.prompts(batch, seed=batch)]
    names = llm.enqueue(inputs, params, use_tqdm=False)
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


def timed(bench: Any, batch: int, seeds: bool, logprobs: bool) -> float:
    """Return the median milliseconds of a step in which all requests draw a token."""
    from lit_qrl.rollout.vllm.process import kept_process_state

    step, seconds = bench.engine.llm.llm_engine.step, []
    with kept_process_state():
        names = _begin(bench, batch, seeds, logprobs)
        for _ in range(TIMED):
            start = time.perf_counter()
            step()
            bench.sync()
            seconds.append(time.perf_counter() - start)
        _end(bench, names)
    return round(1e3 * statistics.median(seconds), 3)


def profiled(bench: Any, batch: int) -> dict[str, Any]:
    """Return the device's milliseconds of a step as a rollout takes it, by kind, and the largest kernels."""
    from torch.profiler import ProfilerActivity, profile

    from lit_qrl.rollout.vllm.process import kept_process_state

    with kept_process_state():
        names = _begin(bench, batch, True, True)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (bench.device == "cuda")
        with profile(activities=activities) as found:
            for _ in range(PROFILED):
                bench.engine.llm.llm_engine.step()
            bench.sync()
        _end(bench, names)
    rows = []
    for event in found.key_averages():
        own = 1e-3 * getattr(event, "self_device_time_total", 0.0) / PROFILED
        if own > 0 and not event.key.startswith(("aten::", "ProfilerStep", "vllm::", "_C::")):
            rows.append((round(own, 4), event.count / PROFILED, event.key[:100]))
    rows.sort(reverse=True)
    kinds: dict[str, float] = {}
    for own, _, name in rows:
        kind = next((kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE)), "other")
        kinds[kind] = round(kinds.get(kind, 0.0) + own, 3)
    return {"device": round(sum(row[0] for row in rows), 3), "kinds": kinds, "top": rows[:SHOWN]}


def _end(bench: Any, names: list[str]) -> None:
    engine = bench.engine.llm.llm_engine
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
