"""Where a learner and its vLLM sampler differ by a bit: module by module, on one GPU.

python benchmarks/exactness.py ops                              # vLLM's kernels alone: does a row depend on others?
python benchmarks/exactness.py kernels                          # which kernels of both sides give the same bits
"""

import argparse
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]


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
            for batch in (1, 8, 64):
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

        own, own_scales = dispatch.e4m3_inputs(x, True)
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
                dispatch.e4m3_inputs(a, True)[0].float(),
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

        many_rows = of_many_rows(vllm_ops.cutlass_scaled_mm)

        def product(a: Any, s: Any, f: Any = many_rows, w: Any = codes, scales: Any = scales, bias: Any = bias) -> Any:
            return f(a, w, s, scales, dtype, bias)

        for name, alike in (("", False), (", few rows as many", True)):
            with same_kernels.built(alike):
                told(f"FP8 product {inputs} to {outputs}{name}", lambda f=product, r=rows: in_any_batch(f, *r))

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="command", required=True)
    kinds.add_parser("ops")
    kinds.add_parser("kernels")
    args = parser.parse_args()
    {"ops": ops, "kernels": kernels}[args.command](args)


if __name__ == "__main__":
    main()
