"""What is said of a learner's speed."""

import logging

import pytest
import torch
from transformers import Qwen2Config

from lit_qrl.precision import cost


class Model:
    def __init__(self, width):
        self.config = Qwen2Config(hidden_size=width)


@pytest.mark.parametrize(
    ("learner", "width", "device", "said"),
    [
        ("UnifiedFP8", 2048, "cuda", None),
        ("UnifiedFP8", 3072, "cuda", None),
        ("QATAligned(fp8_row)", 2048, "cuda", None),
        ("slow", 1536, "cpu", None),
        ("slow", 2048, "cuda", "1.02"),
        ("slow", 4096, "cuda", None),
        ("QATAligned(int4_group)", 4096, "cuda", None),
    ],
)
def test_a_learner_that_is_slower_says_so_once(learner, width, device, said, caplog, monkeypatch):
    monkeypatch.setitem(cost.UPDATES, "slow", {1536: 1.02, 3584: 0.92})
    cost._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            cost.tell_cost(learner, Model(width), torch.device(device))
    assert len(caplog.messages) == (said is not None)
    if said is not None:
        assert f"{learner} is slower than bf16 here" in caplog.text
        assert f"took {said} times as long" in caplog.text
    cost.tell_cost(learner, torch.nn.Linear(2, 2), torch.device("cuda"))  # no language model
