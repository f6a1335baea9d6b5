"""What makes a decoding step shorter, of the GPU's work and of the host's beside it."""

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_qrl.formats.kernels import gemm
from lit_qrl.rollout.vllm import same_kernels
from lit_qrl.rollout.vllm.patches import Patch
from lit_qrl.rollout.vllm.server import SERVES

BLOCK = gemm.BLOCK
DRAW = 4
"""By what a generator's offset grows with a draw: CUDA's generators count in fours."""

# ------------------------------------------------------------------------------------- FP8 products by blocks


def by_blocks(
    codes: Tensor, scales: Tensor, weight: Tensor, block_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return `(codes · scales) @ (weight · block_scales).T + bias`: "m n".

    vLLM's CUTLASS kernel goes by tiles of many rows: for 128 sequences it takes as long as bf16's. A weight that is too
    small to give every multiprocessor a tile goes through our product, which cuts it along its inputs; others, and more
    rows, go through cuBLASLt. Sums are added in another order.

    Args:
        codes: "m k", float8_e4m3fn.
        scales: "m k/128", fp32, column by column.
        weight: "n k", float8_e4m3fn.
        block_scales: "n/128 k/128", fp32.
        bias: " n", or None.
        dtype: of the result.
    """
    (m, k), n = codes.shape, weight.shape[0]
    if same_kernels.active():  # the learner's product, whose sums do not depend on the number of rows
        layout = block_scales.t() if k % (4 * BLOCK) == 0 else gemm.block_scale_layout(block_scales)
        return gemm.scaled_mm_block(codes, scales, weight, layout, bias, dtype)
    if gemm.few_rows(m, n, k):
        from lit_qrl.formats.kernels import products_triton

        return products_triton.product(codes, scales, weight, block_scales, bias, dtype)
    if m % 4 == 0 and k % (4 * BLOCK) == 0:  # cuBLASLt wants scales in fours; these need no copy
        out = gemm.block_product(codes, scales, weight, block_scales.t(), dtype)
    else:
        from vllm import _custom_ops as ops

        out = ops.cutlass_scaled_mm(codes, weight.t(), scale_a=scales, scale_b=block_scales.t(), out_dtype=dtype)
    return out if bias is None else out.add_(bias)


def multiplied(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a layer's product, `by_blocks` where weight, scales and device are what that takes."""
    operator = _operator()

    def apply_weights(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None, **named: Any) -> Tensor:
        weight, scale = layer.weight, _block_scale(layer)
        (n, k), dtype = weight.shape, self.config.out_dtype or x.dtype
        if scale is None or not _of_blocks(scale, n, k) or not takes(x, weight, scale):
            return original(self, layer, x, bias, **named)
        codes, scales = self.quant_fp8(x.view(-1, k), None, None)
        multiply = operator if torch.compiler.is_compiling() else by_blocks
        return multiply(codes, scales, weight, scale, bias, dtype).view(*x.shape[:-1], n)

    return apply_weights


def _of_blocks(scale: Tensor, n: int, k: int) -> bool:
    return scale.shape == (n // BLOCK, k // BLOCK) and scale.is_contiguous()


def _block_scale(layer: Any) -> Tensor | None:
    found = (getattr(layer, name, None) for name in ("weight_scale", "weight_scale_inv"))
    return next((scale for scale in found if scale is not None), None)


def takes(x: Tensor, weight: Tensor, scale: Tensor) -> bool:
    """Return whether such inputs, "... k", and a weight "n k" with its scales are what our product multiplies."""
    whole = weight.shape[0] % BLOCK == weight.shape[1] % BLOCK == 0 and weight.is_contiguous()
    return whole and scale.dtype == torch.float32 and x.device.type == "cuda" and _here() and not _invariant()


@torch.compiler.assume_constant_result
def _here() -> bool:
    return gemm.fp8_block_gemm(torch.device("cuda", torch.cuda.current_device()), (BLOCK, BLOCK))


@lru_cache
def _operator() -> Any:
    """Return `by_blocks` as one operator; torch's compiler does not look into it, for it chooses by the rows."""

    def made_up(codes: Tensor, scales: Tensor, weight: Tensor, block_scales: Tensor, bias: Any, dtype: Any) -> Tensor:
        return codes.new_empty((codes.shape[0], weight.shape[0]), dtype=dtype)

    made = torch.library.custom_op("lit_qrl::by_blocks", by_blocks, mutates_args=())
    made.register_fake(made_up)
    return torch.ops.lit_qrl.by_blocks


def _invariant() -> bool:
    from vllm import envs

    return bool(envs.VLLM_BATCH_INVARIANT)


# -------------------------------------------------------------------------------------------- seeds of requests


def drawn_at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `random_sample`, with the noise of all requests that have seeds from one kernel."""

    def random_sample(probs: Tensor, generators: dict[int, Any], *args: Any, **kwargs: Any) -> Tensor:
        fp64 = any(args) or any(kwargs.values())
        if not generators or fp64 or probs.dtype != torch.float32 or probs.device.type != "cuda":
            return original(probs, generators, *args, **kwargs)
        return probs.div_(noise_of(probs, generators)).argmax(dim=-1).view(-1)

    return random_sample


def noise_of(probs: Tensor, generators: dict[int, Any]) -> Tensor:
    """Return exponential noise "rows words": of rows with a generator from its seed, of the others from torch's own.

    What is drawn with a seed is not what vLLM itself would draw with it; the distribution is the same.

    Args:
        probs: "rows words".
        generators: by row; each is taken on by one draw.
    """
    from lit_qrl_vllm_fast.noise_triton import exponential_rows, on_device

    noise = torch.empty_like(probs, memory_format=torch.contiguous_format)
    if len(generators) != len(probs):
        noise.exponential_()
    asked = list(generators.values())
    offsets = [one.get_offset() for one in asked]
    for one, offset in zip(asked, offsets, strict=True):
        one.set_offset(offset + DRAW)
    numbers = [*generators, *(one.initial_seed() for one in asked), *(offset // DRAW for offset in offsets)]
    rows, seeds, draws = on_device(numbers, probs.device).view(3, -1)
    exponential_rows(noise, rows, seeds, draws)
    return noise


# ------------------------------------------------------------------------------------------------------ the host


class One(tuple):
    """Word, log-prob and rank of one drawn token; in another process it is `LogprobsLists` of three arrays of none."""

    __slots__ = ()


def of_one_word(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what gives a request its part of a step's log-probs: `One` where that is the drawn token's alone.

    Only where who takes it knows `One`: this process, or the front of a server that a run or `lit-qrl serve` starts.
    """
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0" and SERVES not in os.environ:
        return original

    def slice_request(self: Any, req_idx: int, num_positions: int) -> Any:
        words, logprobs, ranks, starts = self
        if num_positions == 1 and starts is None and logprobs.ndim == 2 and logprobs.shape[1] == 1:
            return One((words.item(req_idx, 0), logprobs.item(req_idx, 0), ranks.item(req_idx)))
        return original(self, req_idx, num_positions)

    return slice_request


def appended(original: Callable[..., None]) -> Callable[..., None]:
    """Return the processor's function that takes a token's log-prob, which appends one number of each."""

    def _update_sample_logprobs(self: Any, logprobs_lists: Any) -> None:
        there, to = type(logprobs_lists) is not One, self.logprobs
        if there and logprobs_lists[1].ndim > 0:
            original(self, logprobs_lists)
            return
        word, logprob, rank = (one.item() for one in logprobs_lists[:3]) if there else logprobs_lists
        if self.tokenizer is None and hasattr(to, "append_fast"):
            self.cumulative_logprob += logprob
            to.start_indices.append(len(to.logprobs))
            to.token_ids.append(word)
            to.logprobs.append(logprob)
            to.ranks.append(rank)
            to.decoded_tokens.append(None)
            to.end_indices.append(len(to.logprobs))
        else:
            original(self, (np.array([[word]]), np.array([[logprob]]), np.array([rank]), None))

    return _update_sample_logprobs


def of_a_number(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the decoder of arrays from another process, which makes one of no dimension of a number."""

    def _decode_ndarray(self: Any, arr: Any) -> Any:
        return original(self, arr) if type(arr) is list else np.array(arr)

    return _decode_ndarray


def block_there(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `allocate_slots`, which goes on at once where the next token's place is in a block that it does not fill.

    A block holds the keys and values of 16 tokens. Nothing is allocated, freed or remembered for other prompts then.
    Layers with a window or a state, proposed tokens and the first step of a block stay with vLLM.
    """

    def allocate_slots(self: Any, request: Any, num_new_tokens: int, *args: Any, **named: Any) -> Any:
        if num_new_tokens == 1 and not args and named == {"num_lookahead_tokens": 0}:
            managers = self.coordinator.single_type_managers
            if len(managers) == 1 and type(managers[0]).__name__ == "FullAttentionManager":
                computed, size = request.num_computed_tokens, managers[0].block_size
                held = managers[0].req_to_blocks.get(request.request_id, ())
                if 0 < computed % size < size - 1 and computed < len(held) * size:
                    return self.empty_kv_cache_blocks
        return original(self, request, num_new_tokens, *args, **named)

    return allocate_slots


_BLOCKS = "vllm.model_executor.kernels.linear.scaled_mm.cutlass:CutlassFp8BlockScaledMMKernel.apply_weights"
_SAMPLE = "vllm.v1.sample.ops.topk_topp_sampler:random_sample"
_SLICE, _APPEND = "vllm.v1.outputs:LogprobsLists.slice_request", "vllm.logprobs:FlatLogprobs.append_fast"
_UPDATE = "vllm.v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs"
_DECODE = "vllm.v1.serial_utils:MsgpackDecoder._decode_ndarray"
_SLOTS = "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots"
CHANGES = (
    Patch(
        "block_products",
        "block-scaled FP8 products of up to 128 rows take as long as bf16's",
        "the four products of a 7B decoder layer 134 µs at 128 rows and 147 at 8; with it 104 and 75 (H200)",
        {_BLOCKS: multiplied},
        device="cuda",
        sources={_BLOCKS: ("4286aa02", "8e7fa815")},
    ),
    Patch(
        "request_noise",
        "the first runner makes the noise of requests that have seeds one by one, a launch for each at every step",
        "1.9 ms of the host in a step of 512 requests; with it 0.2 (an EPYC)",
        {_SAMPLE: drawn_at_once},
        device="cuda",
        sources={_SAMPLE: ("88fe260e",)},
    ),
    Patch(
        "sampled_logprobs",
        "three arrays are cut for the log-prob of each drawn token, and each is gone through as if it held many",
        "0.7 ms of the host in a step of 128 requests, of which the GPU takes four for a small or quantized model; to "
        "another process 9.4 µs a token, with it 2.3",
        {_SLICE: of_one_word, _UPDATE: appended, _DECODE: of_a_number},
        sources={_SLICE: ("9ea7a1b0",), _UPDATE: ("87a0d597",), _APPEND: ("8d86ea5d",), _DECODE: ("9b822770",)},
    ),
    Patch(
        "allocate_slots",
        "four managers are asked for memory for each decoded token, though fifteen of sixteen have some already",
        "the schedule of a step of 128 requests 1.1 ms; with it 0.5 (an EPYC)",
        {_SLOTS: block_there},
        [
            "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager",
            f"{_SLOTS.rpartition('.')[0]}.__init__.empty_kv_cache_blocks",
        ],
        sources={_SLOTS: ("13addc8a", "dfe61d6e", "b913bb6e", "01ee3757")},
    ),
)
