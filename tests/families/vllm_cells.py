"""One cell of the table of families through vLLM on this host: two publishes far apart, compared with the learner.

`python -m tests.families.table --engines vllm` measures and keeps them.
"""

import copy
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from lit_qrl.errors import ConfigError
from lit_qrl.network.adapters import merged_weights
from lit_qrl.network.linears import check_quantizable
from lit_qrl.rollout.vllm.installation import RUN_WITH, installed_version
from lit_qrl.types import SamplingParams
from tests import vllm_engines
from tests.families.configs import Family, random_network, sized
from tests.networks import WORDS
from tests.vllm_engines import reference_logprobs, sampler_format

FORMATS = ("plain", "bf16", "fp8_row", "fp8_tensor", "int4_group", "nvfp4")
PROMPT, COMPLETION, PROMPTS = 40, 8, 4
TOLERANCE = {"plain": 1e-5}
"""Largest mean |Δ log p| that a cell may show; the formats' kernels round to bf16 or quantize activations."""
LOW_BIT = 0.05
ROUNDED_TWICE = 2.0
"""Times the learner's own difference between bf16 and fp32 that an engine in bf16 may differ: each side rounds once."""


def of_the_table(version: tuple[int, ...] = max(RUN_WITH)) -> bool:
    """Return whether the installed vLLM is not older than a version: that of the table of families."""
    found = installed_version()
    return found is not None and found[0][:2] >= version


def prompts() -> list[list[int]]:
    """Return prompts longer than every sliding window."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, len(WORDS), (PROMPT + i,), generator=generator).tolist() for i in range(PROMPTS)]


def eager_network(family: Family, seed: int) -> Any:
    """Return the tiny model with the attention that is written out, which drops no part of it."""
    network = random_network(sized(family), seed)
    network.set_attn_implementation("eager")
    return network


def start(network: Any, format: Any, **options: Any) -> Any:
    """Return an engine for the network, validated as a run does it; its weights are still to come.

    Raises:
        ConfigError: where this host's vLLM cannot.
    """
    from lit_qrl.rollout.engine import SamplerSpec
    from lit_qrl.rollout.vllm.engine import VLLMEngine
    from tests import vllm_cpu_shim

    vllm_cpu_shim.install()
    engine = VLLMEngine(**{"max_num_seqs": 8, "kv_cache_gib": 0.25, **options})
    sampling = SamplingParams(max_tokens=COMPLETION, ignore_stop=True)
    spec = SamplerSpec(sampling=sampling, format=format, prompt_limit=PROMPT + PROMPTS)
    engine.validate(spec)
    if format is not None and format.quantization_config():
        check_quantizable(network, format.name)
    engine.check_model(network)
    policy: Any = SimpleNamespace(network=network)
    engine.setup(spec, policy)
    return engine


def stream(network: Any, engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return what a publish sends: every tensor of the learner in the engine's format and dtype."""
    return engine.arranged(vllm_engines.checkpoint(network, engine, engine.spec.format))


def dtype_of(family: Family) -> str:
    """Return the `dtype` of an engine for a family: linear attention has kernels for bf16 alone in the CPU build."""
    return "bf16" if "linear_key_head_dim" in family.options else "auto"


def publish(network: Any, engine: Any, version: int, previous: Any = None, wire: Any = lambda stream: stream) -> Any:
    """Publish all weights and buffers and look into every layer; return the faults, what was sent, and the report."""
    return vllm_engines.publish(network, engine, engine.spec.format, version, previous, wire, everywhere=True)


def disagreement(network: Any, engine: Any) -> tuple[float, float]:
    """Return the mean |Δ log p| of the engine's completions from an uncached forward of the learner.

    The second is the mean by which the learner's own forward in the engine's dtype differs from the same one.
    """
    asked, dtype = prompts(), engine.plain_dtype
    rounded = network if dtype == torch.float32 else copy.deepcopy(network).to(dtype)
    differences, own = [], []
    for prompt, completion in zip(asked, engine.generate(asked, 1, seed=7), strict=True):
        expected = reference_logprobs(network, prompt, completion.token_ids, engine.spec.format, dtype)
        differences.append((torch.tensor(completion.logprobs) - expected).abs())
        own.append((reference_logprobs(rounded, prompt, completion.token_ids) - expected).abs())
    return float(torch.cat(differences).mean()), float(torch.cat(own).mean())


def allowed(engine: Any, format_name: str, rounding: float) -> float:
    """Return the largest mean |Δ log p| of a sampler that computes what the learner does."""
    if engine.plain_dtype == torch.float32:
        return TOLERANCE.get(format_name, LOW_BIT)
    return max(LOW_BIT, ROUNDED_TWICE * rounding)


def _share(network: Any, unread: Iterable[str]) -> float:
    """Return the share of the model's numbers that are in the tensors of those names."""
    sizes = {name: tensor.numel() for name, tensor in merged_weights(network)}
    return sum(sizes.get(name, 0) for name in unread) / sum(sizes.values())


def run_cell(family: Family, format_name: str) -> dict[str, Any]:
    """Return what two publishes far apart gave: `outcome` is works, refused, faulty, wrong or failed."""
    cell: dict[str, Any] = {"family": family.name, "format": format_name}
    engine = None
    try:
        format = sampler_format(format_name)
        engine = start(eager_network(family, 0), format, dtype=dtype_of(family))
        outcome = "works"
        for version in range(2):
            network = eager_network(family, version)
            faults, _, report = publish(network, engine, version)
            cell["faults"] = [str(fault) for fault in faults]
            cell["verified"] = 1 - _share(network, report.received.unread)
            cell["difference"], rounding = disagreement(network, engine)
            cell["along_routes"] = engine.live.routes is not None
            close = cell["difference"] <= allowed(engine, format_name, rounding)
            outcome = "faulty" if faults else "works" if close else "wrong"
            if outcome != "works":
                break
        return {**cell, "outcome": outcome}
    except ConfigError as error:
        return {**cell, "outcome": "refused", "message": str(error)}
    except Exception as error:
        return {**cell, "outcome": "failed", "message": f"{type(error).__name__}: {error}"}
    finally:
        if engine is not None:
            engine.close()
