"""Microseconds of the products of a decode step, by kernel, at the shapes of a decoder layer.

    python benchmarks/products.py                    # every product that is there, ours as `plan` cuts it
    python benchmarks/products.py --search 90        # the best cuts of ours first, for 90 seconds at most

Each is recorded in a CUDA graph over as many weights as the cache does not hold, as a step reads them, and replayed.
`TB/s` counts the weight alone. Rows are printed as they are measured; what is missing or fails is named.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "packages" / "vllm_fast")]

SHAPES = {
    "0.5b": {"qkv": (1152, 896), "o": (896, 896), "gate_up": (9728, 896), "down": (896, 4864)},
    "1.5b": {"qkv": (2048, 1536), "o": (1536, 1536), "gate_up": (17920, 1536), "down": (1536, 8960)},
    "7b": {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)},
    "32b": {"qkv": (7168, 5120), "o": (5120, 5120), "gate_up": (55296, 5120), "down": (5120, 27648)},
    "tiny": {"one": (256, 512)},
}
"""Rows and columns of the weights that an engine multiplies."""
COLD = 320 * 2**20
"""Bytes of weights that a graph goes through, more than the cache holds."""
REPLAYS = 6
BLOCK = 128
Call = Callable[[int], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 64, 32, 8, 256])
    parser.add_argument("--search", type=float, default=0.0, help="seconds for the cuts of our product")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for the rest")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args()
    import torch

    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    found: dict[str, Any] = {}

    def kept() -> None:
        if args.out:
            args.out.write_text(json.dumps(found, indent=1))

    bench = Products(SHAPES[args.shape])
    if args.search:
        found["best"] = search(bench, args.rows, args.search, kept)
    end = time.perf_counter() + args.budget
    for rows in args.rows:
        for layer in bench.shapes:
            for name, call in bench.products(layer, rows):
                if time.perf_counter() < end:
                    found[f"{rows} {layer} {name}"] = bench.told(rows, layer, name, call)
        kept()
    summary(found, args.rows, list(bench.shapes))


def timed(call: Call, copies: int) -> float:
    """Return microseconds of one of `copies` calls, each with a weight of its own, replayed as a graph."""
    import torch

    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(copies):
            call(index)
    graph.replay()
    torch.cuda.synchronize()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(stop) / (REPLAYS * copies)


class Products:
    """Weights of each layer, in bf16 and with scales per row and per block, as many as the cache does not hold."""

    def __init__(self, shapes: dict[str, tuple[int, int]]) -> None:
        import torch

        self.shapes, self.plain, self.codes, self.scales = shapes, {}, {}, {}
        for layer, (n, k) in shapes.items():
            copies = max(2, min(24, -(-COLD // (n * k))))
            self.plain[layer] = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
            self.codes[layer] = [one.to(torch.float8_e4m3fn) for one in self.plain[layer]]
            self.scales[layer] = [torch.rand(n // BLOCK, k // BLOCK, device="cuda") + 0.5 for _ in range(copies)]

    def told(self, rows: int, layer: str, name: str, call: Call) -> float | str:
        """Return the microseconds of a call, or what it failed with, and print it."""
        copies = len(self.codes[layer])
        try:
            found: float | str = round(timed(call, copies), 2)
        except Exception as error:
            found = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:150]
            import torch

            torch.cuda.synchronize()
        rate = ""
        if isinstance(found, float):
            n, k = self.shapes[layer]
            rate = f"{(2 if name == 'bf16' else 1) * n * k / found * 1e-6:5.2f} TB/s"
        print(f"{rows:4d} {layer:>8} {name:<28} {found!s:>8} {rate}", flush=True)
        return found

    def products(self, layer: str, rows: int) -> Iterator[tuple[str, Call]]:
        import torch
        from lit_qrl_vllm_fast import decoding
        from torch.nn import functional as F

        from lit_qrl.formats.kernels import gemm, products_triton

        (n, k), e4m3 = self.shapes[layer], torch.float8_e4m3fn
        plain, codes, scales = self.plain[layer], self.codes[layer], self.scales[layer]
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        yield "bf16", lambda i: F.linear(x, plain[i])
        a = x.to(e4m3)
        by_row = torch.rand(rows, 1, device="cuda") + 0.5
        of_rows = torch.rand(n, 1, device="cuda") + 0.5
        ops = vllm_ops()
        if ops is not None:
            yield (
                "fp8_row, CUTLASS of vLLM",
                lambda i: ops.cutlass_scaled_mm(
                    a, codes[i].t(), out_dtype=torch.bfloat16, scale_a=by_row, scale_b=of_rows
                ),
            )
        yield "fp8_row, torch", lambda i: gemm.scaled_mm(a, by_row, codes[i], of_rows, None, torch.bfloat16)
        yield "fp8_row, ours", lambda i: products_triton.product(a, by_row, codes[i], of_rows, None, torch.bfloat16)
        along = torch.rand(rows, k // BLOCK, device="cuda") + 0.5
        across = along.t().contiguous().t()
        if ops is not None:
            yield (
                "fp8_block, CUTLASS of vLLM",
                lambda i: ops.cutlass_scaled_mm(
                    a, codes[i].t(), out_dtype=torch.bfloat16, scale_a=across, scale_b=scales[i].t()
                ),
            )
            from vllm.model_executor.layers.quantization.utils import fp8_utils

            yield (
                "fp8_block, Triton of vLLM",
                lambda i: fp8_utils.w8a8_triton_block_scaled_mm(
                    a, codes[i], along, scales[i], [BLOCK, BLOCK], torch.bfloat16
                ),
            )
        laid = [gemm.block_scale_layout(one) for one in scales]
        yield "fp8_block, torch", lambda i: gemm.block_product(a, across, codes[i], laid[i], torch.bfloat16)
        yield (
            "fp8_block, torch, settled",
            lambda i: gemm.scaled_mm_block(a, across, codes[i], laid[i], None, torch.bfloat16),
        )
        yield (
            "fp8_block, as patched",
            lambda i: decoding.by_blocks(a, across, codes[i], scales[i], None, torch.bfloat16),
        )
        yield "fp8_block, ours", lambda i: products_triton.product(a, across, codes[i], scales[i], None, torch.bfloat16)


def vllm_ops() -> Any:
    """Return vLLM's operators, or None where they are not there."""
    import torch

    try:
        from vllm import _custom_ops as ops
    except ImportError:
        return None
    return ops if hasattr(torch.ops._C, "cutlass_scaled_mm") else None


def cuts(rows: int, n: int, k: int) -> Iterator[Any]:
    """Yield the ways to cut a product that are worth a try."""
    from lit_qrl.formats.kernels.products_triton import Plan

    whole = min(max(1 << (rows - 1).bit_length(), 16), 128)
    for height in sorted({whole, max(whole // 2, 16)}, reverse=True):
        for width in (64, 128):
            tiles = -(-rows // height) * (n // width)
            for parts in (1, 2, 3, 4, 5, 6, 8, 10, 12):
                if k // BLOCK // parts < 3 or (parts > 1 and tiles * parts > 660):
                    continue
                for warps in (4, 8) if height * width >= 64 * 128 else (4,):
                    for stages in (3, 4, 5):
                        if stages * BLOCK * (height + width) <= 200 * 2**10:
                            yield Plan(height, width, parts, warps, stages)


def search(bench: Products, rows: list[int], budget: float, kept: Callable[[], None]) -> dict[str, Any]:
    """Return the fastest cuts of our product by rows and layer."""
    import torch

    from lit_qrl.formats.kernels import products_triton

    end = time.perf_counter() + budget
    layer = next(iter(bench.shapes))
    small: dict[Any, tuple[int, Any]] = {}
    for m in rows:
        for how in cuts(m, *bench.shapes[layer]):
            small.setdefault((how.rows, how.columns, how.parts > 1, how.warps, how.stages), (m, how))

    def call(layer: str, m: int, how: Any) -> Call:
        k, codes, scales = bench.shapes[layer][1], bench.codes[layer], bench.scales[layer]
        a = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn)
        scale = torch.rand(k // BLOCK, m, device="cuda").t() + 0.5
        return lambda i: products_triton.product(a, scale, codes[i], scales[i], None, torch.bfloat16, how)

    start = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:  # most of a compilation is outside of Python
        list(pool.map(lambda one: call(layer, one[0], one[1])(0), small.values()))
    torch.cuda.synchronize()
    print(f"{len(small)} kernels compiled in {time.perf_counter() - start:.1f} s", flush=True)
    best: dict[str, Any] = {}
    for m in rows:
        for layer, shape in bench.shapes.items():
            tried: list[Any] = []
            for how in cuts(m, *shape):
                if time.perf_counter() > end:
                    break
                try:
                    tried.append((round(timed(call(layer, m, how), len(bench.codes[layer])), 2), list(how)))
                except Exception as error:
                    print(how, type(error).__name__, str(error)[:80], flush=True)
            if tried:
                best[f"{m} {layer}"] = sorted(tried)[:4]
                print(f"best {m:4d} {layer:>8} of {len(tried)}: {sorted(tried)[:3]}", flush=True)
        kept()
    return best


def summary(found: dict[str, Any], rows: list[int], layers: list[str]) -> None:
    """Print what all products of a decoder layer take, by kernel."""
    names = list(dict.fromkeys(key.split(" ", 2)[2] for key in found if key.split(" ")[1:2] and key != "best"))
    print("\nmicroseconds of the products of a decoder layer\n" + " | ".join([f"{'':28}", *(f"{m:>8}" for m in rows)]))
    for name in names:
        cells = []
        for m in rows:
            given = (found.get(f"{m} {layer} {name}") for layer in layers)
            own = [one for one in given if isinstance(one, float)]
            cells.append(f"{sum(own):8.1f}" if len(own) == len(layers) else f"{'-':>8}")
        if any(cell.strip() != "-" for cell in cells):
            print(" | ".join([f"{name:28}", *cells]))
    best = found.get("best", {})
    if best:
        cells = []
        for m in rows:
            own = [best[key][0][0] for key in (f"{m} {layer}" for layer in layers) if key in best]
            cells.append(f"{sum(own):8.1f}" if len(own) == len(layers) else f"{'-':>8}")
        print(" | ".join([f"{'fp8_block, ours, best cuts':28}", *cells]))


if __name__ == "__main__":
    main()
