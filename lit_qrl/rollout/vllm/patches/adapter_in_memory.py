"""vLLM reads LoRA adapters from files only."""

from typing import Any

from torch import Tensor

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions

PLACE = "in-memory"
"""Where the adapter lies, in the place of a folder."""

_offered: list[tuple[dict[str, Tensor], dict[str, Any]]] = []


def register_adapter(llm: Any, tensors: dict[str, Tensor], config: dict[str, Any], slot: int = 1) -> None:
    """Add an adapter to an engine.

    Args:
        llm: the in-process engine.
        tensors: its factors under PEFT's names.
        config: as in PEFT's `adapter_config.json`.
        slot: the id of its requests.
    """
    from vllm.lora.request import LoRARequest

    _offered.append((tensors, config))
    try:
        llm.llm_engine.add_lora(LoRARequest("policy", slot, PLACE, load_inplace=True))
    finally:
        _offered.clear()


def _reading_memory(original: Any) -> Any:
    def load(manager: Any, request: Any) -> Any:
        from vllm.lora.peft_helper import PEFTHelper

        if request.lora_path != PLACE or not _offered:
            return original(manager, request)
        tensors, config = _offered[-1]
        helper = PEFTHelper.from_dict(config)
        helper.validate_legal(manager.lora_config)
        mapper = getattr(manager._adapter_manager.model, "hf_to_vllm_mapper", None)
        if mapper is not None:  # of 0.32, of 0.26
            mapper = getattr(mapper, "get_rename_mapper", None) or mapper.get_unstacked_mapper
            mapper = mapper()
        adapter = manager._lora_model_cls.from_lora_tensors(
            lora_model_id=request.lora_int_id,
            tensors={name: tensor.detach().clone() for name, tensor in tensors.items()},  # it scales them in place
            peft_helper=helper,
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            model_vocab_size=manager.vocab_size,
            weights_mapper=mapper,
        )
        adapter.is_3d_lora_weight = False
        return adapter

    return load


_MANAGER = "vllm.lora.worker_manager:WorkerLoRAManager"
PATCH = Patch(
    __name__,
    Versions("0.26"),
    "a LoRA request may carry tensors",
    {f"{_MANAGER}._load_adapter": _reading_memory},
    [
        f"{_MANAGER}._load_adapter._adapter_manager",
        f"{_MANAGER}._lora_model_cls",
        "vllm.lora.lora_model:LoRAModel.from_lora_tensors",
        "vllm.lora.peft_helper:PEFTHelper.from_dict",
        "vllm.model_executor.models.utils:WeightsMapper.get_rename_mapper|get_unstacked_mapper",
    ],
)
