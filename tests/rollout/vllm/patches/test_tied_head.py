"""A tied head of a whole engine: tests/rollout/test_vllm_known_faults.py."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch

from lit_qrl.rollout.vllm.patches.tied_head import pack_again


def test_only_a_head_that_holds_a_packed_copy_is_packed_again(fake, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    inside = []

    @contextmanager
    def set_current_vllm_config(config):
        inside.append(config)
        yield

    fake("vllm.config", set_current_vllm_config=set_current_vllm_config)
    fake("vllm")
    packed, llm = [], SimpleNamespace(llm_engine=SimpleNamespace(vllm_config="the config"))
    head = torch.nn.Embedding(2, 2)
    head.quant_method = SimpleNamespace(process_weights_after_loading=packed.append)
    pack_again(llm, head)
    assert packed == []
    head.cpu_linear = object()
    pack_again(llm, head)
    assert packed == [head]
    assert inside == ["the config"]
