"""A request for an adapter in memory, on stand-ins for vLLM's LoRA manager; whole engines: test_engine.py."""

from types import SimpleNamespace

import pytest
import torch

from lit_qrl.rollout.vllm.patches.adapter_in_memory import PLACE, _reading_memory, register_adapter


@pytest.mark.parametrize("mapper", ["get_rename_mapper", "get_unstacked_mapper"])
def test_tensors_are_handed_over_for_the_one_request(mapper, fake):
    made, tensors = {}, {"a.lora_A.weight": torch.ones(2)}

    def from_lora_tensors(**arguments):
        made.update(arguments)
        return SimpleNamespace()

    config = SimpleNamespace(lora_dtype=torch.float16)
    model = SimpleNamespace(hf_to_vllm_mapper=SimpleNamespace(**{mapper: lambda: "renames"}))
    manager = SimpleNamespace(
        lora_config=config,
        vocab_size=9,
        _adapter_manager=SimpleNamespace(model=model),
        _lora_model_cls=SimpleNamespace(from_lora_tensors=from_lora_tensors),
    )
    load = _reading_memory(lambda manager, request: "from a file")
    helper = SimpleNamespace(validate_legal=lambda config: made.update(checked=config))
    fake("vllm.lora.peft_helper", PEFTHelper=SimpleNamespace(from_dict=lambda given: helper))
    fake("vllm.lora.request", LoRARequest=lambda name, slot, path, load_inplace: SimpleNamespace(
        lora_int_id=slot, lora_path=path
    ))  # fmt: skip
    fake("vllm"), fake("vllm.lora")
    loaded = []
    engine = SimpleNamespace(add_lora=lambda request: loaded.append(load(manager, request)))
    register_adapter(SimpleNamespace(llm_engine=engine), tensors, {"r": 2}, slot=4)
    assert loaded[0].is_3d_lora_weight is False
    assert (made["lora_model_id"], made["weights_mapper"], made["dtype"]) == (4, "renames", torch.float16)
    assert made["checked"] is config
    given = made["tensors"]["a.lora_A.weight"]
    assert torch.equal(given, tensors["a.lora_A.weight"])
    assert given.data_ptr() != tensors["a.lora_A.weight"].data_ptr()  # vLLM scales them in place
    for place in ("/a/folder", PLACE):  # nothing is offered any more
        assert load(manager, SimpleNamespace(lora_path=place)) == "from a file"
