"""Seconds and peak memory of `lit-qrl quantize` on a checkpoint of random weights, made shard by shard.

    python benchmarks/quantize.py --shape 1.5b --format nvfp4
    python benchmarks/quantize.py --shape 7b --format nvfp4 --device cuda

Memory is the process's largest resident set, in which mapped pages of the shard being read count, and on CUDA the
largest allocation.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from pathlib import Path

# Layers, hidden, intermediate, heads, key-value heads, vocabulary: Qwen2.5's.
SHAPES = {
    "tiny": (4, 256, 512, 4, 2, 1000),
    "1.5b": (28, 1536, 8960, 12, 2, 151936),
    "7b": (28, 3584, 18944, 28, 4, 152064),
    "32b": (64, 5120, 27648, 40, 8, 152064),
}


def make(folder: Path, shape: str, shard_gib: float, device: str) -> float:
    """Write a random checkpoint and return its size in GiB; one shard exists at a time."""
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, Qwen2Config

    from lit_qrl.network.folder import FolderWriter

    layers, hidden, intermediate, heads, key_value_heads, vocabulary = SHAPES[shape]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
    )
    with init_empty_weights():
        network = AutoModelForCausalLM.from_config(config)
    writer = FolderWriter(folder, int(shard_gib * 2**30))
    generator = torch.Generator(device).manual_seed(0)
    for name, empty in network.state_dict().items():
        noise = torch.randn(empty.shape, generator=generator, dtype=torch.float32, device=device)
        # norms and biases as a trained model has them in kind: a few channels are large
        if empty.dim() == 1 and name.endswith("norm.weight"):
            noise = 1 + 0.2 * noise
            noise[:: max(len(noise) // 16, 1)] *= 20
        else:
            noise *= 0.02
        writer.add(name, noise.bfloat16())
    writer.close()
    config.save_pretrained(folder)
    return writer.bytes / 2**30


def peak_gib() -> float:
    """Return this process's largest resident set so far (getrusage would count its parent's, too)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 2**20


def measure(arguments: argparse.Namespace, source: Path, output: Path, results: dict) -> None:
    """Quantize in this process, and put down what it took."""
    import torch

    from lit_qrl.quantize import quantize_checkpoint, writable

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    before = peak_gib()
    started = time.perf_counter()
    report = quantize_checkpoint(
        source,
        output,
        writable(arguments.format),
        device=arguments.device,
        shard_bytes=int(arguments.shard_gib * 2**30),
        progress=lambda done, total: print(f"layer {done}/{total}", end="\r", flush=True),
    )
    results.update(
        seconds=time.perf_counter() - started,
        before_gib=before,
        peak_gib=peak_gib(),
        source_gib=report.bytes_before / 2**30,
        output_gib=report.bytes_after / 2**30,
    )
    if arguments.device != "cpu":
        results["gpu_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30


def main() -> None:
    """Print a table and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="whose shape (default: tiny)")
    parser.add_argument("--format", default="nvfp4", help="default: nvfp4")
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--shard_gib", type=float, default=1.0, help="of source and output (default: 1)")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 leaves its default")
    parser.add_argument("--folder", type=Path, help="for both checkpoints (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="file to write")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")  # a process of its own: the peak is of the measured work alone
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place, context.Manager() as manager:
        source, output = Path(place) / "source", Path(place) / "output"
        source.mkdir()
        size = make(source, arguments.shape, arguments.shard_gib, arguments.device)
        print(f"checkpoint of {size:.2f} GiB made", flush=True)
        results = manager.dict()
        process = context.Process(target=measure, args=(arguments, source, output, results))
        process.start()
        process.join()
        found = {**vars(arguments), **dict(results)}
    if process.exitcode:
        raise SystemExit(process.exitcode)
    print()
    for name in ("seconds", "before_gib", "peak_gib", "gpu_peak_gib", "source_gib", "output_gib"):
        if name in found:
            print(f"{name:<16} {found[name]:.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
