from dataclasses import replace

import torch

from lit_qrl.loop.batching import assemble
from lit_qrl.types import Completion, MicroBatch, SamplingParams


def batch():
    one = Completion(token_ids=[3, 4], logprobs=[-1.0, -2.0], finish_reason="stop", version=0)
    completions = [one, one]
    made = assemble([[1]], completions, group_size=2, pad_token_id=0)
    made.reward_parts = {"answer": torch.tensor([1.0, 0.0])}
    return made


def test_to_moves_every_tensor_and_keeps_dtypes():
    moved = MicroBatch(batch(), torch.tensor(2.0), torch.arange(2), torch.tensor(True)).to("meta")
    assert moved.batch.tokens.device.type == "meta"
    assert moved.batch.reward_parts["answer"].device.type == "meta"
    assert moved.total.device.type == "meta"
    assert moved.batch.sampler_logprobs.dtype == torch.float32
    assert len(moved) == 2


def test_a_layout_moves_with_its_rows_and_is_dropped_by_a_selection():
    class Layout:
        def to(self, device):
            return f"on {device}"

    laid_out = replace(batch(), layout=Layout())
    assert laid_out.to("meta").layout == "on meta"
    assert laid_out.select(torch.tensor([1])).layout is None
    assert batch().to("meta").layout is None


def test_micro_batch_is_opaque_to_lightning():
    from lightning_utilities.core.apply_func import apply_to_collection

    micro = MicroBatch(batch(), torch.tensor(2.0), torch.arange(2), torch.tensor(True))
    cast = apply_to_collection(micro, torch.Tensor, lambda tensor: tensor.bfloat16())
    assert cast.batch.sampler_logprobs.dtype == torch.float32


def test_truncated_sampling_is_recognised():
    assert not SamplingParams().truncated
    assert SamplingParams(top_p=0.9).truncated
    assert SamplingParams(top_k=5).truncated
