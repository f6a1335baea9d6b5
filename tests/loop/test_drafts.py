import pytest
import torch

from lit_qrl.loop.schedule import packed, unpacked
from lit_qrl.types import Completion


@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        ([], {"version": 2}),
        ([5], {"version": 3}),
        ([4, 5], {"version": 3, "versions": [3, 4]}),
        ([1], {"version": 0, "routed_experts": torch.ones(2, 1)}),
        ([4, 5], {"version": 3, "kept": [torch.tensor([4, 7]), torch.tensor([5])]}),
    ],
)
def test_completions_are_packed_and_unpacked(tmp_path, tokens, options):
    logprobs = [-1 / (3 + i) for i in range(len(tokens))]
    one = Completion(token_ids=tokens, logprobs=logprobs, finish_reason="length", **options)
    torch.save(packed(one), tmp_path / "saved")
    again = unpacked(torch.load(tmp_path / "saved", weights_only=True))
    for name in ("routed_experts", "kept"):
        torch.testing.assert_close(getattr(again, name), getattr(one, name), rtol=0, atol=0)
        setattr(one, name, None)
        setattr(again, name, None)
    assert again == one
