"""Where a learner and its vLLM sampler differ by a bit: module by module, on one GPU.

    python benchmarks/exactness.py ops                              # vLLM's kernels alone: does a row depend on others?
    python benchmarks/exactness.py kernels                          # which kernels of both sides give the same bits
    python benchmarks/exactness.py engine --shape 1.5b --format bf16 --modules      # an engine against the learner
    python benchmarks/exactness.py engine --shape 1.5b --format fp8_row --off       # the same without the switch
    python benchmarks/exactness.py all --out FOLDER --jobs "ops" "engine --shape tiny --format bf16 --modules"

Weights are random. `engine` draws completions at batches of 1, 8 and 64, prints tokens/s, and the largest |log-ratio|
of the learner's whole sequences to what vLLM reported; with `--modules` also which module's output differs first.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 16}
    | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 2048, "initializer_range": 0.05},
    "mini": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "initializer_range": 0.05},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
    | {"num_key_value_heads": 2, "vocab_size": 8192},
}
BATCHES = (1, 8, 64)
PLACES = ("layernorm", "_proj", "_norm", "model.norm", ".attn", "act_fn", "embed_tokens")
"""How the names of the compared modules end."""


def show(kind: str, **figures: Any) -> None:
    print("EXACT " + json.dumps({"kind": kind, **figures}), flush=True)


# ----------------------------------------------------------------------------------------------------------------- ops


def ops(args: argparse.Namespace) -> None:
    """Compare rows of a small call with the same rows of a large one, for each kernel."""
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    import torch
    from torch.nn import functional as F
    from vllm import _custom_ops as vllm_ops
    from vllm.model_executor.layers import batch_invariant as bi
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    torch.manual_seed(0)
    device, dtype = "cuda", torch.bfloat16
    rows = (1, 8, 16, 17, 64, 65, 100, 128, 129, 256, 1000)
    many = 2048

    def check(name: str, kernel: Any, *inputs: Any) -> Any:
        try:
            whole = kernel(*(one.clone() for one in inputs))
            differ = {}
            for m in rows:
                for start in (0, 777):
                    part = kernel(*(one[start : start + m].clone() for one in inputs))
                    count = int((part != whole[start : start + m]).sum())
                    if count:
                        differ[f"{m}@{start}"] = count
            show("rows", name=name, equal=not differ, differ=differ)
            return whole
        except Exception as error:
            show("rows", name=name, error=f"{type(error).__name__}: {error}"[:200])
            traceback.print_exc()
            return None

    def same(name: str, a: Any, b: Any) -> None:
        if a is not None and b is not None:
            apart = (a.float() - b.float()).abs()
            show("same", name=name, equal=bool((a == b).all()), count=int((a != b).sum()), largest=float(apart.max()))

    h, inner = 1536, 8960
    x = torch.randn(many, h, device=device, dtype=dtype)
    y = torch.randn(many, h, device=device, dtype=dtype)
    w = torch.randn(2048, h, device=device, dtype=dtype) * 0.02
    bias = torch.randn(2048, device=device, dtype=dtype)
    gain = torch.rand(h, device=device, dtype=dtype) + 0.5

    fused = check("matmul_persistent", lambda a: bi.linear_batch_invariant(a, w, bias), x)
    if fused is not None:
        parts = [
            bi.linear_batch_invariant(x, w[p], bias[p]) for p in (slice(0, 1536), slice(1536, 1792), slice(1792, 2048))
        ]
        same("matmul_persistent: q, k, v apart", fused, torch.cat(parts, dim=1))
        same("matmul_persistent: cuBLAS", fused, F.linear(x, w) + bias)
    check("cuBLAS", lambda a: F.linear(a, w), x)
    plain = check("rms_norm", lambda a: bi.rms_norm_batch_invariant(a, gain, 1e-6), x)

    def summed(a: Any) -> Any:
        out = torch.zeros_like(a)
        vllm_ops.fused_add_rms_norm(out, a.clone(), gain, 1e-6)
        return out

    added = check("fused_add_rms_norm", summed, x)
    same("rms_norm: fused_add_rms_norm", plain, added)
    first, residual = x.clone(), y.clone()
    vllm_ops.fused_add_rms_norm(first, residual, gain, 1e-6)
    same("fused_add_rms_norm: sum made before", first, summed(x + y))
    same("fused_add_rms_norm: the sum", residual, x + y)
    raised = x.float()
    normed = raised * torch.rsqrt(raised.square().mean(-1, keepdim=True) + 1e-6)
    same("fused_add_rms_norm: Hugging Face", added, gain * normed.to(dtype))

    gate_up = torch.randn(many, 2 * inner, device=device, dtype=dtype)

    def gated(a: Any) -> Any:
        out = torch.empty(len(a), inner, device=device, dtype=dtype)
        torch.ops._C.silu_and_mul(out, a)
        return out

    out = check("silu_and_mul", gated, gate_up)
    same("silu_and_mul: torch", out, F.silu(gate_up[:, :inner]) * gate_up[:, inner:])

    d = 128
    at = torch.arange(many, device=device)
    freq = 1.0 / (1e4 ** (torch.arange(0, d, 2, dtype=torch.float, device=device) / d))
    angles = torch.einsum("i,j->ij", at.float(), freq)
    cache = torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)

    def rotated(a: Any, p: Any) -> Any:
        q, k = a.clone(), a[:, :256].clone()
        vllm_ops.rotary_embedding(p, q, k, d, cache, True)
        return q

    out = check("rotary_embedding", rotated, x, at)
    heads = x.view(many, -1, d)
    cos, sin = (torch.cat((one, one), -1)[:, None] for one in cache.chunk(2, dim=-1))
    turned = torch.cat((-heads[..., 64:], heads[..., :64]), dim=-1)
    same("rotary_embedding: torch in bf16", out, (heads * cos + turned * sin).view(many, -1))
    wide = heads.float() * cos.float() + turned.float() * sin.float()
    same("rotary_embedding: torch in fp32", out, wide.to(dtype).view(many, -1))

    logits = torch.randn(many, 8192, device=device) * 4
    out = check("log_softmax (Triton)", bi.log_softmax, logits)
    check("log_softmax (torch)", lambda a: F.log_softmax(a, dim=-1), logits)
    same("log_softmax: torch", out, F.log_softmax(logits, dim=-1))

    # one sequence of 600 tokens: paged decoding of single tokens, pieces and the whole, against the whole without pages
    for heads_q, heads_k, d in ((12, 2, 128), (16, 8, 128), (14, 2, 64)):
        n, page = 600, 16
        q = torch.randn(n, heads_q, d, device=device, dtype=dtype)
        k, v = (torch.randn(n, heads_k, d, device=device, dtype=dtype) for _ in range(2))
        starts = torch.tensor([0, n], dtype=torch.int32, device=device)
        options: dict[str, Any] = {"softmax_scale": d**-0.5, "causal": True, "num_splits": 1, "fa_version": 3}
        try:
            whole = flash_attn_varlen_func(
                q, k, v, max_seqlen_q=n, cu_seqlens_q=starts, max_seqlen_k=n, cu_seqlens_k=starts, **options
            )
            pages = -(-n // page)
            order = torch.randperm(pages + 7, device=device)[:pages]
            held = torch.zeros(2, pages + 7, page, heads_k, d, device=device, dtype=dtype)
            for i, one in enumerate((k, v)):
                padded = F.pad(one, (0, 0, 0, 0, 0, pages * page - n)).view(pages, page, heads_k, d)
                held[i, order] = padded
            table = order.int()[None]

            def paged(
                queries: Any,
                used: list[int],
                lengths: list[int],
                most: int = 1,
                held: Any = held,
                table: Any = table,
                options: Any = options,
                n: int = n,
            ) -> Any:
                begin = torch.tensor([0, *lengths], device=device).cumsum(0).int()
                return flash_attn_varlen_func(
                    queries,
                    held[0],
                    held[1],
                    max_seqlen_q=max(most, *lengths),
                    cu_seqlens_q=begin,
                    max_seqlen_k=max(used),
                    seqused_k=torch.tensor(used, dtype=torch.int32, device=device),
                    block_table=table.expand(len(used), -1).contiguous(),
                    **options,
                )

            name = f"attention {heads_q}/{heads_k}×{d}"
            same(f"{name}: paged whole", whole, paged(q, [n], [n]))
            pieces = torch.cat([paged(q[s : s + 100], [s + 100], [100]) for s in range(0, n, 100)])
            same(f"{name}: paged pieces", whole, pieces)
            for batch in BATCHES:
                for most in (1, 2):  # the length of a query that FlashAttention is told of
                    groups = [list(range(s, min(s + batch, n))) for s in range(0, n, batch)]
                    drawn = torch.cat([paged(q[g], [i + 1 for i in g], [1] * len(g), most) for g in groups])
                    same(f"{name}: paged tokens, batch {batch}, told {most}", whole, drawn)
            two = torch.tensor([0, n, 2 * n], dtype=torch.int32, device=device)
            twice = flash_attn_varlen_func(
                *(torch.cat((one, one)) for one in (q, k, v)),
                max_seqlen_q=n,
                cu_seqlens_q=two,
                max_seqlen_k=n,
                cu_seqlens_k=two,
                **options,
            )
            same(f"{name}: two sequences", torch.cat((whole, whole)), twice)
        except Exception as error:
            show("same", name=f"attention {heads_q}/{heads_k}×{d}", error=f"{type(error).__name__}: {error}"[:200])
            traceback.print_exc()

    from lit_qrl import formats
    from lit_qrl.precision.vllm_kernels.kernels import CutlassFP8Row

    tall = torch.randn(17920, h, device=device, dtype=dtype) * 0.02
    for kernel, format in ((CutlassFP8Row(), formats.get("fp8_row")),):
        for weight in (w, tall, w[:1536], w[:256]):
            label = f"{format.name} cutlass {tuple(weight.shape)}"
            try:
                held = kernel.prepare(format.quantize(weight), dtype)
                found = check(label, lambda a, kernel=kernel, held=held: kernel.apply(a, held, None), x)
                if weight is not w:
                    large = kernel.apply(x, kernel.prepare(format.quantize(w), dtype), None)
                    if len(weight) <= len(w):
                        same(f"{label}: as a part of {len(w)} rows", found, large[:, : len(weight)])
                elif format.name == "fp8_row":
                    same(f"{label}: torch", found, format.apply(x, format.prepare(format.quantize(weight), dtype)))
            except Exception as error:
                show("rows", name=label, error=f"{type(error).__name__}: {error}"[:200])
    wide, down = torch.randn(many, inner, device=device, dtype=dtype), torch.randn(h, inner, device=device, dtype=dtype)
    check("matmul_persistent, long sums", lambda a: bi.linear_batch_invariant(a, down, None), wide)
    row = formats.get("fp8_row")
    held = CutlassFP8Row().prepare(row.quantize(down), dtype)
    check("fp8_row cutlass, long sums", lambda a: CutlassFP8Row().apply(a, held, bias[:h]), wide)
    block = formats.get("fp8_block")
    for name, weight, given in (("", w, x), (", part", w[:256], x), (", long sums", down, wide)):
        try:
            from vllm.model_executor.layers.quantization.utils import fp8_utils

            from lit_qrl.formats.kernels import dispatch
            from lit_qrl.precision.layers.block_fp8 import Torch

            q, own = block.quantize(weight), Torch()
            codes, factors = q.codes.contiguous(), q.scales.float().contiguous()

            def blocks(a: Any, codes: Any = codes, factors: Any = factors) -> Any:
                rows, scale = fp8_utils.per_token_group_quant_fp8(a, 128, column_major_scales=True, use_ue8m0=False)
                return vllm_ops.cutlass_scaled_mm(rows, codes.T, out_dtype=dtype, scale_a=scale, scale_b=factors.T)

            found = check(f"fp8_block cutlass{name}", blocks, given)
            along, _ = own.quantize(given, True, False)
            same(f"fp8_block cutlass{name}: torch", found, own.multiply(along, own.weight(q)[0], dtype))
            rows, scale = fp8_utils.per_token_group_quant_fp8(given, 128, column_major_scales=True, use_ue8m0=False)
            same(f"fp8_block codes{name}: ours", rows.float(), along.codes.float())
            (_, mine_scale), _ = dispatch.e4m3_tiles(given, True, False)
            show(
                "shapes",
                ours=[list(mine_scale.shape), list(mine_scale.stride())],
                theirs=[list(scale.shape), list(scale.stride())],
            )
            if mine_scale.shape == scale.shape:
                same(f"fp8_block scales{name}: ours", scale, mine_scale)
        except Exception as error:
            show("rows", name=f"fp8_block cutlass{name}", error=f"{type(error).__name__}: {error}"[:200])
            traceback.print_exc()
    x_fp8, scales = vllm_ops.scaled_fp8_quant(x, None, use_per_token_if_dynamic=True)
    part, part_scales = vllm_ops.scaled_fp8_quant(x[777:785].clone(), None, use_per_token_if_dynamic=True)
    same("scaled_fp8_quant rows", part.float(), x_fp8[777:785].float())
    same("scaled_fp8_quant scales", part_scales, scales[777:785])
    try:
        from lit_qrl.formats.kernels import dispatch

        own, own_scales = dispatch.e4m3_tokens(x)
        same("scaled_fp8_quant: ours", own.float(), x_fp8.float())
        same("scaled_fp8_quant scales: ours", own_scales.view(-1), scales.view(-1))
    except Exception as error:
        show("same", name="scaled_fp8_quant: ours", error=f"{type(error).__name__}: {error}"[:200])


# ------------------------------------------------------------------------------------------------------------- kernels


def kernels(args: argparse.Namespace) -> None:
    """Compare, kernel by kernel, what `same_kernels` takes to be equal on both sides."""
    import torch
    from torch.nn import functional as F
    from transformers import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
    from vllm import _custom_ops as vllm_ops
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    from lit_qrl.formats.kernels import dispatch, norm_triton, rotary_triton, tiles_triton
    from lit_qrl.formats.kernels.gemm import MANY
    from lit_qrl.precision.vllm_kernels.exact import flash_attention
    from lit_qrl.rollout.vllm import same_kernels
    from lit_qrl.rollout.vllm.patches import of_many_rows, on_the_cpu

    torch.manual_seed(0)
    device, dtype, many = "cuda", torch.bfloat16, 2048

    def told(name: str, make: Any) -> None:
        try:
            show("kernels", name=name, **make())
        except Exception as error:
            show("kernels", name=name, error=f"{type(error).__name__}: {error}"[:160])
            traceback.print_exc()

    def apart(a: Any, b: Any) -> dict[str, Any]:
        return {"apart": float((a != b).float().mean()), "largest": float((a.float() - b.float()).abs().max())}

    def in_any_batch(kernel: Any, *inputs: Any) -> dict[str, Any]:
        """Return whether rows of small calls have the bits of a large one."""
        whole, differ = kernel(*inputs), []
        for m in (1, 2, 7, 8, 16, 17, 64, 128, 255, 256, 257, 1000):
            for start in (0, 777):
                part = kernel(*(one[start : start + m].contiguous() for one in inputs))
                if not part.equal(whole[start : start + m]):
                    differ.append(m)
        return {"differ": sorted(set(differ))}

    for h, inner in ((896, 4864), (1536, 8960), (3584, 18944)):
        x, y = (torch.randn(many, h, device=device, dtype=dtype) for _ in range(2))
        gain = torch.rand(h, device=device, dtype=dtype) + 0.5
        both = torch.randn(many, 2 * inner, device=device, dtype=dtype)

        def normed(a: Any, b: Any, gain: Any = gain) -> Any:
            return norm_triton.norm(a, gain, 1e-6, b)[1]

        def usual(a: Any, b: Any, gain: Any = gain) -> Any:
            a, b = a.clone(), b.clone()
            vllm_ops.fused_add_rms_norm(a, b, gain, 1e-6)
            return a

        def gated(a: Any, inner: int = inner) -> Any:
            out = torch.empty(len(a), inner, device=device, dtype=dtype)
            torch.ops._C.silu_and_mul(out, a)
            return out

        def ours(a: Any, inner: int = inner) -> Any:
            return tiles_triton.tiles(a[:, :inner], False, False, tiles_triton.GATED, other=a[:, inner:])[0]

        told(f"norm {h}, ours in any batch", lambda f=normed, a=x, b=y: in_any_batch(f, a, b))
        told(f"norm {h}, vLLM in any batch", lambda f=usual, a=x, b=y: in_any_batch(f, a, b))
        told(f"norm {h}, ours and vLLM", lambda f=normed, g=usual, a=x, b=y: apart(f(a, b), g(a, b)))
        told(f"gated {inner}, vLLM in any batch", lambda f=gated, a=both: in_any_batch(f, a))
        told(f"gated {inner}, ours and vLLM", lambda f=ours, g=gated, a=both: apart(f(a), g(a)))
        told(
            f"FP8 rows {h}, ours and vLLM",
            lambda a=x: apart(
                dispatch.e4m3_tokens(a)[0].float(),
                vllm_ops.scaled_fp8_quant(a, None, use_per_token_if_dynamic=True)[0].float(),
            ),
        )

    for d, base in ((64, 1e6), (128, 1e6), (128, 1e4)):
        config = Qwen2Config(hidden_size=8 * d, num_attention_heads=8, head_dim=d, rope_theta=base)
        at = torch.arange(many, device=device)
        mine = Qwen2RotaryEmbedding(config).to(device)(torch.zeros(1, 1, device=device, dtype=dtype), at[None])
        q = torch.randn(many, 8, d, device=device, dtype=dtype)
        angles = Qwen2RotaryEmbedding(config).inv_freq.to(device)

        def theirs(frequencies: Any, at: Any = at) -> Any:
            freqs = torch.einsum("i,j -> ij", at.float(), frequencies)
            return torch.cat((freqs.cos(), freqs.sin()), dim=-1).to(dtype)

        def powers(base: float = base, d: int = d) -> Any:
            return 1.0 / (base ** (torch.arange(0, d, 2, dtype=torch.float) / d))

        with torch.device(device):
            on_device, on_cpu = powers(), on_the_cpu(powers)()
        halves = torch.cat([one[0][:, : d // 2] for one in mine], dim=-1)
        told(f"frequencies {d}, on the device", lambda a=angles, b=on_device: apart(a, b))
        told(f"frequencies {d}, on the CPU", lambda a=angles, b=on_cpu: apart(a, b))
        told(f"cosines {d}, on the device", lambda a=halves, b=on_device, f=theirs: apart(a, f(b)))
        told(f"cosines {d}, on the CPU", lambda a=halves, b=on_cpu, f=theirs: apart(a, f(b)))

        def turned(a: Any, cache: Any = halves, at: Any = at, d: int = d) -> Any:
            out, key = a.flatten(1).clone(), a.flatten(1).clone()
            vllm_ops.rotary_embedding(at, out, key, d, cache.contiguous(), True)
            return out.view(a.shape)

        told(
            f"rotation {d}, ours and vLLM",
            lambda a=q, f=turned, c=mine: apart(rotary_triton.rotate(a, *(one[0].contiguous() for one in c)), f(a)),
        )

    for inputs, outputs in ((896, 1152), (896, 9728), (4864, 896), (1536, 17920), (8960, 1536), (3584, 37888)):
        w = torch.randn(outputs, inputs, device=device) * 0.02
        scales = w.abs().amax(1, keepdim=True) / 448
        codes, bias = (w / scales).to(torch.float8_e4m3fn).t(), torch.randn(outputs, device=device, dtype=dtype)
        x = torch.randn(many, inputs, device=device, dtype=dtype)
        rows = vllm_ops.scaled_fp8_quant(x, None, use_per_token_if_dynamic=True)

        def product(a: Any, s: Any, w: Any = codes, scales: Any = scales, bias: Any = bias) -> Any:
            return vllm_ops.cutlass_scaled_mm(a, w, s, scales, dtype, bias)

        patched = of_many_rows(product)
        for name, alike in (("", False), (", few rows as many", True)):
            with same_kernels.built(alike):
                told(f"FP8 product {inputs} to {outputs}{name}", lambda f=patched, r=rows: in_any_batch(f, *r))

    for heads, key_heads, d in ((14, 2, 64), (8, 8, 64), (12, 2, 128), (16, 8, 128), (8, 8, 96), (8, 4, 256)):
        n, page = 600, 16
        q = torch.randn(n, heads, d, device=device, dtype=dtype)
        k, v = (torch.randn(n, key_heads, d, device=device, dtype=dtype) for _ in range(2))
        pages = -(-n // page)
        order = torch.randperm(pages + 7, device=device)[:pages]
        held = torch.zeros(2, pages + 7, page, key_heads, d, device=device, dtype=dtype)
        for i, one in enumerate((k, v)):
            held[i, order] = F.pad(one, (0, 0, 0, 0, 0, pages * page - n)).view(pages, page, key_heads, d)
        table = order.int()[None]

        def learner(q: Any = q, k: Any = k, v: Any = v) -> Any:
            return flash_attention(q[None], k[None], v[None])[0]

        def paged(
            queries: Any, used: list[int], lengths: list[int], least: int, held: Any = held, table: Any = table
        ) -> Any:
            begin = torch.tensor([0, *lengths], device=device).cumsum(0).int()
            return flash_attn_varlen_func(
                queries, held[0], held[1], max_seqlen_q=max(least, *lengths), cu_seqlens_q=begin,
                max_seqlen_k=max(used), seqused_k=torch.tensor(used, dtype=torch.int32, device=device),
                block_table=table.expand(len(used), -1).contiguous(), causal=True, num_splits=1, fa_version=3,
            )  # fmt: skip

        def tokens(batch: int, least: int, f: Any = paged, q: Any = q, n: int = n) -> Any:
            groups = [list(range(s, min(s + batch, n))) for s in range(0, n, batch)]
            return torch.cat([f(q[g], [i + 1 for i in g], [1] * len(g), least) for g in groups])

        def pieces(f: Any = paged, q: Any = q, n: int = n) -> Any:
            return torch.cat([f(q[s : s + 100], [s + 100], [100], 1) for s in range(0, n, 100)])

        ways = {"a prompt": lambda f=paged, q=q, n=n: f(q, [n], [n], 1), "a prompt in pieces": pieces}
        ways |= {
            f"{b} tokens at a time{', told of many' if least > 1 else ''}": lambda b=b, t=least, f=tokens: f(b, t)
            for b in (1, 64)
            for least in (1, MANY)
        }
        for way, call in ways.items():
            told(f"attention {heads}/{key_heads} x {d}, {way}", lambda a=learner, b=call: apart(a(), b()))


# -------------------------------------------------------------------------------------------------------------- engine


def engine(args: argparse.Namespace) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    from lit_qrl import formats
    from lit_qrl.network.sampler_kernels import adopt, kernels_adopted
    from lit_qrl.precision import QATAligned
    from lit_qrl.precision.source import unchanged
    from lit_qrl.rollout.engine import SamplerSpec
    from lit_qrl.rollout.vllm.engine import VLLMEngine
    from lit_qrl.rollout.vllm.requests import by_length
    from lit_qrl.types import SamplingParams

    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = args.shape != "1.5b"
    kind, model = (Qwen3Config, Qwen3ForCausalLM) if small else (Qwen2Config, Qwen2ForCausalLM)
    torch.manual_seed(0)
    config = kind(**SHAPES[args.shape], tie_word_embeddings=False, max_position_embeddings=1024)
    with torch.device(device):
        network: Any = model(config).to(torch.bfloat16).eval()
    format = None if args.format == "bf16" else formats.get(args.format)
    started = time.perf_counter()
    sampler = VLLMEngine(
        batch_invariant=not args.off,
        enforce_eager=args.modules,
        quick_start=not args.modules,
        max_num_seqs=64,
        gpu_memory_utilization=0.2,
        kv_cache_gib=4.0,
    )
    sampling = SamplingParams(max_tokens=args.length, ignore_stop=True)
    spec = SamplerSpec(sampling=sampling, format=format, prompt_limit=160)
    sampler.validate(spec)
    sampler.setup(spec, SimpleNamespace(network=network))
    learner = deepcopy(network)  # the engine's start gives its kernels to its own policy's
    stream = [(key, tensor.detach()) for key, tensor in network.named_parameters()]
    if format is not None:
        plugin = QATAligned(format)
        plugin.convert_module(learner)
        plugin.choice.sampler = args.kernels
        policy = SimpleNamespace(network=learner, named_weights=learner.named_parameters)
        stream = list(plugin.source(policy, format).whole(unchanged, torch.bfloat16))
    sampler.load_weights(iter(stream), format, 0)
    show("started", seconds=round(time.perf_counter() - started, 1), off=args.off)
    kernels = None if args.usual else kernels_adopted(network)
    usual = deepcopy(learner)
    if kernels is not None:
        adopt(learner, kernels)
    generator = torch.Generator().manual_seed(1)
    for batch in (*BATCHES, *(() if args.modules else (BATCHES[-1],))):
        lengths = torch.randint(8, 150, (batch,), generator=generator).tolist()
        prompts = [torch.randint(3, config.vocab_size, (n,), generator=generator).tolist() for n in lengths]
        taken = Modules(sampler.live) if args.modules and batch > 1 else None
        begun = time.perf_counter()
        drawn = sampler.generate(prompts, 1, seed=batch)
        rate = batch * args.length / (time.perf_counter() - begun)
        if taken is not None:
            taken.remove()
        sequences = [p + list(c.token_ids) for p, c in zip(prompts, drawn, strict=True)]
        apart, mean, kl, count = 0.0, 0.0, 0.0, 0
        begun = time.perf_counter()
        for i, (tokens, completion) in enumerate(zip(sequences, drawn, strict=True)):
            own = Modules(None, learner) if taken is not None and i < 4 else None
            scores = score(learner, tokens, lengths[i], kernels, device)
            if own is not None and taken is not None:
                own.remove()
                taken.compare(own, i, by_length(prompts, 1).index(i), batch)
            ratio = scores - torch.tensor(completion.logprobs)
            apart, mean = max(apart, float(ratio.abs().max())), mean + float(ratio.abs().sum())
            kl += float((torch.exp(ratio) - 1 - ratio).sum())
            count += len(ratio)
        show(
            "log_ratio",
            shape=args.shape,
            format=args.format,
            off=args.off,
            usual=args.usual,
            kernels=args.kernels,
            batch=batch,
            tokens=count,
            largest=apart,
            mean=mean / count,
            kl=kl / count,
            tokens_per_s=round(rate),
            score_seconds=round(time.perf_counter() - begun, 2),
        )
    # the sampler against itself, and the learner's gradients
    reported = sampler.score(sequences[:8])
    for_own = [score(learner, s, 1, kernels, device) for s in sequences[:8]]
    worst = max(float((a.cpu() - b).abs().max()) for a, b in zip(reported, for_own, strict=True))
    show("scored", largest=worst)
    if kernels is not None:
        gradients(learner, usual, sequences[0], kernels, device)
    sys.stdout.flush()
    os._exit(0)


def score(learner: Any, tokens: list[int], start: int, kernels: Any, device: str) -> Any:
    import torch

    from lit_qrl.functional.logprobs import token_logprobs
    from lit_qrl.network.invariant import batch_invariant

    row = torch.tensor([tokens], device=device)
    with torch.no_grad(), batch_invariant(kernels is not None, kernels):
        hidden = learner.model(input_ids=row, use_cache=False).last_hidden_state[:, start - 1 : -1]
        pick = None if kernels is None else kernels.logprobs
        return token_logprobs(hidden, learner.lm_head.weight, row[:, start:], pick=pick)[0][0].cpu()


def gradients(learner: Any, usual: Any, tokens: list[int], kernels: Any, device: str) -> None:
    """Compare the gradients of the exact forward pass with those of a copy that computes as usual."""
    import torch

    from lit_qrl.functional.logprobs import token_logprobs
    from lit_qrl.network.invariant import batch_invariant

    row, found = torch.tensor([tokens], device=device), []
    for network, own in ((learner, kernels), (usual, None)):
        with batch_invariant(own is not None, own):
            hidden = network.model(input_ids=row, use_cache=False).last_hidden_state[:, :-1]
            pick = None if own is None else own.logprobs
            loss = token_logprobs(hidden, network.lm_head.weight, row[:, 1:], pick=pick)[0].sum()
        found += torch.autograd.grad(loss, network.model.layers[0].self_attn.q_proj.weight)
    a, b = (one.float().flatten() for one in found)
    cosine = torch.nn.functional.cosine_similarity(a, b, dim=0)
    show("gradients", cosine=float(cosine), norm=float(a.norm() / b.norm()))


class Modules:
    """Outputs of modules by place: of a live vLLM model, with the request of each row, or of a learner."""

    def __init__(self, live: Any, learner: Any = None) -> None:
        self.rows: list[dict[str, Any]] = []
        self.hooks: list[Any] = []
        self.live, self.calls = live, 0
        if live is not None:
            model = live.model
            self.hooks.append(model.register_forward_pre_hook(self._begin, with_kwargs=True))
        else:
            model = learner
            self.rows.append({})
        for name, module in model.named_modules():
            if name.endswith(PLACES):
                self.hooks.append(module.register_forward_hook(self._taken(name)))
                if live is None and name.endswith(("o_proj", "down_proj")):
                    self.hooks.append(module.register_forward_pre_hook(self._given(name)))

    def _begin(self, module: Any, args: Any, kwargs: Any) -> None:
        from vllm.forward_context import get_forward_context

        positions = kwargs.get("positions", args[1] if len(args) > 1 else None)
        found = get_forward_context().attn_metadata
        one = next(iter(found.values())) if isinstance(found, dict) and found else None
        begin = None if one is None else one.query_start_loc.tolist()
        names = list(self.live.runner.input_batch.req_ids)
        self.rows.append({"": (begin, names, positions.clone())})

    def _taken(self, name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            out = output[0] if isinstance(output, tuple) else output
            if out is not None and self.rows:
                self.rows[-1][name] = out.detach().clone()

        return hook

    def _given(self, name: str) -> Any:
        place = name.replace("o_proj", "attn").replace("down_proj", "act_fn")

        def hook(module: Any, inputs: Any) -> None:
            self.rows[-1][place] = inputs[0].detach().clone()

        return hook

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def compare(self, own: "Modules", index: int, rank: int, batch: int) -> None:
        """Print, for one sequence, which places differ first in prefilled and in decoded rows.

        Args:
            own: the learner's.
            index: of the sequence.
            rank: its place in the order in which requests were submitted.
            batch: sequences drawn together.
        """
        mine = own.rows[0]
        request = sorted({name for row in self.rows for name in row[""][1]}, key=number)[rank]
        found: dict[str, dict[str, dict[str, Any]]] = {"prefill": {}, "decode": {}}
        for row in self.rows:
            begin, names, positions = row[""]
            if begin is None or request not in names:
                continue
            i = names.index(request)
            at = positions[begin[i] : begin[i + 1]]
            for place, theirs in row.items():
                other = counterpart(mine, place) if place else None
                if other is None or theirs.shape[0] < begin[i + 1] or int(at[-1]) >= other.shape[1]:
                    continue
                other, part = other[0][at].reshape(len(at), -1), theirs[begin[i] : begin[i + 1]].reshape(len(at), -1)
                if part.shape != other.shape:
                    continue
                entry = found["decode" if len(at) == 1 else "prefill"].setdefault(
                    place, {"rows": 0, "apart": 0, "largest": 0.0}
                )
                entry["rows"] += len(at)
                entry["apart"] += int((part != other).any(dim=1).sum())
                entry["largest"] = max(entry["largest"], float((part.float() - other.float()).abs().max()))
        for phase, entries in found.items():
            bad = {place: entry for place, entry in entries.items() if entry["apart"]}
            equal = "all" if not bad else [place for place in entries if place not in bad][:16]
            first = dict(list(bad.items())[:6])
            show("modules", batch=batch, sequence=index, phase=phase, places=len(entries), apart=first, equal=equal)


def number(name: str) -> int:
    return int(str(name).split("-")[0])


def counterpart(mine: dict[str, Any], place: str) -> Any:
    """Return the learner's output at a place of vLLM's model; fused ones are put together."""
    import torch

    if place in mine:
        return mine[place]
    for fused, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
        if place.endswith(fused):
            names = [place.replace(fused, part) for part in parts]
            if all(name in mine for name in names):
                return torch.cat([mine[name] for name in names], dim=-1)
    return None


# ----------------------------------------------------------------------------------------------------------------- all


def everything(args: argparse.Namespace) -> None:
    """Run jobs side by side, each with a log of its own, and print their figures last."""
    args.out.mkdir(parents=True, exist_ok=True)
    running = []
    for number, job in enumerate(args.jobs):
        log = (args.out / f"{number}_{job.replace(' ', '_').replace('-', '')}.log").open("w")
        command = ["timeout", "-k", "5", str(args.timeout), sys.executable, __file__, *job.split()]
        running.append((job, log.name, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)))
    for job, name, process in running:
        code = process.wait()
        lines = [line for line in Path(name).read_text(errors="replace").splitlines() if line.startswith("EXACT ")]
        print(f"=== {job}: exit {code}", *lines, sep="\n", flush=True)
        if code or not lines:
            print(*Path(name).read_text(errors="replace").splitlines()[-12:], sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="command", required=True)
    kinds.add_parser("ops")
    kinds.add_parser("kernels")
    one = kinds.add_parser("engine")
    one.add_argument("--shape", choices=SHAPES, default="tiny")
    one.add_argument("--format", default="bf16")
    one.add_argument("--modules", action="store_true", help="compare outputs of modules, without CUDA graphs")
    one.add_argument("--off", action="store_true", help="without batch_invariant, for comparison")
    one.add_argument("--usual", action="store_true", help="batch-invariant sampler, learner with its usual kernels")
    one.add_argument("--kernels", choices=("vllm", "torch"), default="vllm", help="of low-bit layers in the learner")
    one.add_argument("--length", type=int, default=64, help="tokens of each completion")
    several = kinds.add_parser("all")
    several.add_argument("--jobs", nargs="+", required=True)
    several.add_argument("--out", type=Path, required=True)
    several.add_argument("--timeout", type=int, default=85)
    args = parser.parse_args()
    {"ops": ops, "kernels": kernels, "engine": engine, "all": everything}[args.command](args)


if __name__ == "__main__":
    main()
