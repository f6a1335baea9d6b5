"""The linear layers of a decode step, alone: a base in NVFP4, INT4 or bf16 for a few rows, and a LoRA of rank 32 on it.

    python benchmarks/linears.py --shape 32b --rows 1 8 16 --out out.json

Weights are random bits. Each line is one product of a layer, recorded in a CUDA graph over some layers' weights, more
than the caches hold, so that times are of a decode step's: microseconds a product, and the share of the bandwidth that
reading its weight once would take. The lines are printed as they are measured.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

SHAPES: dict[str, dict[str, tuple[int, tuple[int, ...]]]] = {
    "32b": {"qkv": (5120, (5120, 1024, 1024)), "o": (5120, (5120,))}
    | {"gate_up": (5120, (27648, 27648)), "down": (27648, (5120,))},
    "7b": {"qkv": (3584, (3584, 512, 512)), "o": (3584, (3584,))}
    | {"gate_up": (3584, (18944, 18944)), "down": (18944, (3584,))},
}  # fmt: skip
"""Inputs, and outputs of each slice, of a layer's four products."""
RANK = 32
BANDWIDTH = 4.3e12
"""Bytes a second that the memory of an H200 gives."""
MOST = 1.2e9
"""Bytes of weights that a graph goes through; caches hold 50 MB."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="32b")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 1, 16])
    parser.add_argument("--seconds", type=float, default=80, help="no line starts later")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("every product needs a GPU")
    end = time.perf_counter() + args.seconds
    found: dict[str, Any] = {}
    for rows in args.rows:
        for name, (inputs, outputs) in SHAPES[args.shape].items():
            case = Case(rows, inputs, outputs)
            for arm, body in case.arms().items():
                if time.perf_counter() > end:
                    break
                try:
                    us = measured(body, case.layers)
                except Exception as error:
                    print(f"{name:8s} rows {rows:3d} {arm:34s} {type(error).__name__}: {str(error)[:200]}", flush=True)
                    continue
                floor = 1e6 * case.bytes[arm.split()[0]] / BANDWIDTH
                found[f"{name}/{rows}/{arm}"] = us
                shown = f"{us:8.2f} us  {floor / us:5.2f} of bandwidth"
                print(f"{name:8s} rows {rows:3d} {arm:40s} {shown}", flush=True)
            del case
            if args.out:
                args.out.write_text(json.dumps(found, indent=1))
    for rows in args.rows:
        sums: dict[str, list[float]] = {}
        for key, us in found.items():
            _, of, arm = key.split("/")
            if int(of) == rows:
                sums.setdefault(arm, []).append(us)
        whole = [f"{arm} {sum(us):.1f}" for arm, us in sums.items() if len(us) == len(SHAPES[args.shape])]
        print(f"sum of the four products, rows {rows}: " + ", ".join(whole))


def measured(body: Callable[[int], Any], layers: int, repeats: int = 10) -> float:
    """Return microseconds of one product, of a graph of all layers'."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for layer in range(layers):  # which compiles, and writes what no graph can
            body(layer)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for layer in range(layers):
                body(layer)
        graph.replay()
        begin, finish = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        times = []
        for _ in range(3):
            begin.record(stream)
            for _ in range(repeats):
                graph.replay()
            finish.record(stream)
            stream.synchronize()
            times.append(1e3 * begin.elapsed_time(finish) / repeats / layers)
    return min(times)


class Case:
    """Random weights of some layers, and the ways to multiply by them."""

    def __init__(self, rows: int, inputs: int, outputs: tuple[int, ...]) -> None:
        from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new

        device = torch.device("cuda")
        n = sum(outputs)
        size = n * inputs * 4.5 / 8
        self.layers = max(2, min(16, int(MOST / size)))
        self.rows, self.inputs, self.outputs, self.n = rows, inputs, outputs, n
        self.bytes = {
            "nvfp4": size,
            "int4": n * inputs * 4.125 / 8,
            "bf16": n * inputs * 2.0,
            "lora": 2.0 * RANK * (len(outputs) * inputs + n),
        }
        options = {"device": device}
        self.x = torch.randn(rows, inputs, dtype=torch.bfloat16, **options)
        self.words = [
            torch.randint(-(2**31), 2**31 - 1, (inputs // 16, 2 * n), dtype=torch.int32, **options)
            for _ in range(self.layers)
        ]
        self.scales = [
            torch.randint(160, 208, (inputs // 16, n), dtype=torch.uint8, **options).view(torch.float8_e4m3fn)
            for _ in range(self.layers)
        ]
        self.groups = [torch.ones(inputs // 128, n, dtype=torch.bfloat16, **options) for _ in range(self.layers)]
        self.whole = torch.full((1,), 2.0**112 * inputs**-0.5, dtype=torch.float32, **options)
        self.workspace = marlin_make_workspace_new(device)
        self.bf16 = [torch.randn(n, inputs, dtype=torch.bfloat16, **options) for _ in range(2)]
        self.a = [
            torch.randn(len(outputs) * RANK, inputs, dtype=torch.bfloat16, **options) * inputs**-0.5
            for _ in range(self.layers)
        ]
        self.b = [torch.randn(n, RANK, dtype=torch.bfloat16, **options) for _ in range(self.layers)]
        self.y = torch.zeros(rows, n, dtype=torch.bfloat16, **options)

    def arms(self) -> dict[str, Callable[[int], Any]]:
        return {
            "nvfp4 Marlin": self.marlin,
            "nvfp4 Marlin, atomic": lambda i: self.marlin(i, atomic=True),
            "nvfp4 Marlin, bf16 sums": lambda i: self.marlin(i, fp32=False),
            "int4 Marlin": self.int4,
            "bf16": lambda i: self.x @ self.bf16[i % 2].T,
            "lora vLLM": self.punica(),
            "nvfp4 + lora vLLM": self.both(self.marlin, self.punica()),
        }

    def marlin(self, i: int, atomic: bool = False, fp32: bool = True) -> torch.Tensor:
        import vllm._custom_ops as ops
        from vllm.scalar_type import scalar_types

        return ops.marlin_gemm(
            a=self.x, c=None, b_q_weight=self.words[i], b_bias=None, b_scales=self.scales[i], a_scales=None,
            global_scale=self.whole, b_zeros=None, g_idx=None, perm=None, workspace=self.workspace,
            b_q_type=scalar_types.float4_e2m1f, size_m=self.rows, size_n=self.n, size_k=self.inputs,
            use_atomic_add=atomic, use_fp32_reduce=fp32,
        )  # fmt: skip

    def int4(self, i: int) -> torch.Tensor:
        import vllm._custom_ops as ops
        from vllm.scalar_type import scalar_types

        return ops.marlin_gemm(
            a=self.x, c=None, b_q_weight=self.words[i], b_bias=None, b_scales=self.groups[i], a_scales=None,
            global_scale=None, b_zeros=None, g_idx=None, perm=None, workspace=self.workspace,
            b_q_type=scalar_types.uint4b8, size_m=self.rows, size_n=self.n, size_k=self.inputs,
            use_atomic_add=False, use_fp32_reduce=True,
        )  # fmt: skip

    def punica(self) -> Callable[..., Any]:
        from vllm.lora.ops.triton_ops import LoRAKernelMeta, lora_expand, lora_shrink

        meta = LoRAKernelMeta.make(1, max(self.rows, 64), device="cuda")
        meta.prepare_tensors(torch.zeros(self.rows, dtype=torch.int32, device="cuda"))
        slices = len(self.outputs)
        a = [tuple(t.unsqueeze(0).unsqueeze(0) for t in one.chunk(slices)) for one in self.a]
        b = [tuple(t.unsqueeze(0).unsqueeze(0) for t in one.split(list(self.outputs))) for one in self.b]

        def product(i: int, y: torch.Tensor | None = None) -> None:
            y = self.y if y is None else y
            buffer = torch.empty((slices, self.rows, RANK), dtype=torch.float32, device="cuda")
            lora_shrink(self.x, a[i], buffer, *meta.meta_args(self.rows, False), 1.0)
            lora_expand(buffer, b[i], y, *meta.meta_args(self.rows, False), offset_start=0, add_inputs=True)

        return product

    def both(self, base: Callable[[int], Any], lora: Callable[..., Any]) -> Callable[[int], Any]:
        def product(i: int) -> Any:
            y = base(i)
            lora(i, y)
            return y

        return product


if __name__ == "__main__":
    main()
