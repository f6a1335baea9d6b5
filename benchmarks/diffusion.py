"""Masked-diffusion rollouts: FP8 against bf16, each phase of a step, and what keeping keys and values changes.

    python benchmarks/diffusion.py --out out.json

LLaDA-8B's shape with random weights, completions of 256 tokens in blocks of 32, two tokens unmasked in each step. For
each (batch, G), as in the AIS paper's Table 6: seconds of generation, of the sampler's and of the reference's
log-probs, and peak memory, in bf16 and in FP8 with one dynamic scale per tensor; `plain` is a plain form of the
published loop (a full forward per step, logits of all positions, no early stop) in bf16, in the same run. Then, for
each way of keeping keys and values, seconds and the share of tokens that differ from the exact ones.

Figures are medians of `--repeats` after one warm-up. `--tiny` tries every line on a CPU; its figures mean nothing but
the differences of `--model`, a folder with trained weights.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from lit_qrl import formats  # noqa: E402
from lit_qrl.functional.diffusion import gumbel_argmax  # noqa: E402
from lit_qrl.loop.batching import assemble  # noqa: E402
from lit_qrl.network.adapters import merged_weights  # noqa: E402
from lit_qrl.network.denoising import Estimator  # noqa: E402
from lit_qrl.network.linears import quantizable_linears  # noqa: E402
from lit_qrl.network.llada import LLaDAConfig  # noqa: E402
from lit_qrl.network.stream import weight_stream  # noqa: E402
from lit_qrl.rollout import DiffusionEngine  # noqa: E402
from lit_qrl.rollout.engine import SamplerSpec  # noqa: E402
from lit_qrl.types import SamplingParams  # noqa: E402

LLADA = {
    "d_model": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 32,
    "mlp_hidden_size": 12288,
    "vocab_size": 126464,
    "embedding_size": 126464,
    "mask_token_id": 126336,
    "max_sequence_length": 4096,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
}
TINY = {**LLADA, "d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 128}
TINY |= {"vocab_size": 64, "embedding_size": 64, "mask_token_id": 63, "max_sequence_length": 128}
SHAPES = [(4, 4), (8, 4), (8, 8), (16, 4), (16, 8)]
"""(batch, G): so many sequences at a time, in groups of G."""
REUSE = ("none", "prompt", "blocks")


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a masked-diffusion model; without it, LLaDA-8B's shape at random")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, on a CPU")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def timed(work: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Return the median seconds of some work after a warm-up, and what it returned last."""
    result, seconds = work(), []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        result = work()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), result


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def engine_of(network: Any, format: Any, spec: SamplerSpec, options: argparse.Namespace, reuse: Any) -> DiffusionEngine:
    """Return an engine that holds the network's weights in a format."""
    engine = DiffusionEngine(block=options.block, reuse=reuse)
    engine.setup(spec, SimpleNamespace(network=network))
    layers = list(quantizable_linears(network)) if format is not None else []
    engine.load_weights(weight_stream(merged_weights(network), format, layers), format, 0)
    return engine


@torch.inference_mode()
def plain_loop(network: Any, prompts: list[list[int]], length: int, block: int) -> torch.Tensor:
    """Decode as the published loop does: a full forward and all logits at every step."""
    device, mask = network.get_input_embeddings().weight.device, network.config.mask_token_id
    prompt = torch.tensor(prompts, device=device)
    canvas = torch.cat([prompt, torch.full((len(prompts), length), mask, device=device)], dim=1)
    width = prompt.shape[1]
    for start in range(width, width + length, block):
        for _ in range(block // 2):
            logits = network(canvas, use_cache=False).logits
            uniform = torch.rand(logits.shape, dtype=torch.float64, device=device)
            drawn = gumbel_argmax(logits, uniform, 0.9)
            sure = logits.softmax(-1, dtype=torch.float64).gather(-1, drawn[..., None])[..., 0]
            open_ = canvas == mask
            open_[:, :start] = open_[:, start + block :] = False
            chosen = sure.masked_fill(~open_, -1.0).topk(2, dim=1).indices
            canvas.scatter_(1, chosen, drawn.gather(1, chosen))
    return canvas[:, width:]


def main() -> None:
    """Measure and print one JSON object per line."""
    options = parse()
    if options.tiny:
        options.length, options.block, options.prompt, options.repeats = 16, 8, 8, 1
    device = torch.device("cuda" if torch.cuda.is_available() and not options.tiny else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if options.model:
        network = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    else:
        with device:
            config = LLaDAConfig.from_dict(TINY if options.tiny else LLADA)
            network = AutoModelForCausalLM.from_config(config, dtype=dtype)
    network = network.to(device).eval()
    sampling = SamplingParams(max_tokens=options.length, temperature=0.9)
    spec = SamplerSpec(sampling=sampling, estimator=Estimator())
    generator = torch.Generator().manual_seed(0)
    rows: list[dict[str, Any]] = []
    shapes = SHAPES[:1] if options.tiny else SHAPES
    for batch, group in shapes:
        words = min(network.config.mask_token_id, 60_000)
        size = (max(batch // group, 1), options.prompt)
        prompts = torch.randint(4, words, size, generator=generator).tolist()
        row: dict[str, Any] = {"batch": batch, "G": group, "sequences": len(prompts) * group}
        flat = [prompt for prompt in prompts for _ in range(group)]
        work = lambda flat=flat: plain_loop(network, flat, options.length, options.block)  # noqa: E731
        row["plain"] = {"generate": timed(work, options.repeats)[0]}
        for name in ("bf16", "fp8_tensor"):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            format = None if name == "bf16" else formats.get(name)
            engine = engine_of(network, format, spec, options, "none")
            seconds, drawn = timed(lambda e=engine, p=prompts, g=group: e.generate(p, g, 0), options.repeats)
            rollout = assemble(prompts, drawn, group, 0).to(device)
            scoring = timed(lambda e=engine, r=rollout: e.estimate(r), options.repeats)[0]
            row[name] = {"generate": seconds, "log-probs": scoring}
            if device.type == "cuda":
                row[name]["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            engine.close()
        row["fp8 / bf16"] = row["bf16"]["generate"] / row["fp8_tensor"]["generate"]
        row["bf16 / plain"] = row["plain"]["generate"] / row["bf16"]["generate"]
        print(json.dumps(row), flush=True)
        rows.append(row)
    prompts = torch.randint(4, 12, (2, options.prompt), generator=generator).tolist()
    exact: list[Any] = []
    for reuse in REUSE:
        engine = engine_of(network, None, spec, options, reuse)
        seconds, drawn = timed(lambda e=engine: e.generate(prompts, 4, 0), options.repeats)
        exact = exact or drawn
        pairs = [
            (one != other, first != second)
            for a, b in zip(exact, drawn, strict=True)
            for one, other, first, second in zip(a.token_ids, b.token_ids, a.unmasked_at, b.unmasked_at, strict=True)
        ]
        differing = [sum(column) / len(pairs) for column in zip(*pairs, strict=True)]
        row = {"reuse": reuse, "generate": seconds, "other tokens": differing[0], "other steps": differing[1]}
        print(json.dumps(row), flush=True)
        rows.append(row)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
