"""What is asked of vLLM's worker, which has the weights: in this process, in one of several, or behind its server.

vLLM imports this module in every process that has a worker, before the model is there, and mixes the class into its own
(`worker_extension_cls`); so the import also makes the changes to vLLM's code and registers the weight transfer.
`collective_rpc` calls the methods by name.
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory  # noqa: TID253  only vLLM loads this module

from lit_qrl.network.structure import outline
from lit_qrl.receipts.ledger import ReceivedLedger, read_receipts
from lit_qrl.rollout.vllm.adapter import replace_adapter
from lit_qrl.rollout.vllm.arguments import TRANSFER
from lit_qrl.rollout.vllm.installation import versions
from lit_qrl.rollout.vllm.live_model import LiveModel, register_head_bias
from lit_qrl.rollout.vllm.patches import apply_all

apply_all()
WeightTransferEngineFactory.register_engine(TRANSFER, "lit_qrl.rollout.vllm.transfer", "LedgerTransfer")


class WorkerExtension:
    """Connects vLLM's worker to a run: its model seen through checkpoint names, receipts, norms, adapters.

    Methods that end in `_json` are for vLLM's server, which takes strings and gives what JSON can say.
    """

    model_runner: Any
    vllm_config: Any
    weight_transfer_engine: Any
    _weight_update_active: bool

    def connect(self, network: Any, divided: bool = False) -> LiveModel:
        """Return the live model.

        Args:
            network: the learner's Hugging Face model, with or without weights.
            divided: this worker holds a part of the engine.
        """
        live = LiveModel(self.model_runner.get_model(), self.vllm_config, network, divided)
        register_head_bias(live.model, network)
        before = self.weight_transfer_engine.live
        if before is not None:  # of another run with this server: what came over them since it started shows
            live.constants = before.constants
        self.weight_transfer_engine.live = live
        return live

    def update_ledger(self) -> ReceivedLedger:
        """Return what the model holds of the last publish.

        Raises:
            PublishError: where a layer came only in part.
        """
        if self.weight_transfer_engine.error is not None:
            raise self.weight_transfer_engine.error
        return self.weight_transfer_engine.ledger

    def abandon_update(self) -> None:
        """Give up a publish that went wrong on its way; again, it changes nothing."""
        self._weight_update_active = False
        if self.weight_transfer_engine.live is not None:
            self.weight_transfer_engine.live.abandon()

    def perturb(self, tensors: Iterator[tuple[str, Tensor]], ledger: ReceivedLedger) -> None:
        """Overwrite norms in place, and write into `ledger` what they hold."""
        self.weight_transfer_engine.live.replace(tensors, ledger)

    def replace_adapter(self, tensors: Iterator[tuple[str, Tensor]], ledger: ReceivedLedger, config: Any) -> None:
        """Replace the adapter beside the base, and write into `ledger` what its buffers hold.

        Args:
            tensors: its factors under PEFT's names.
            ledger: for the receipts.
            config: the policy's PEFT config.
        """
        live, manager = self.weight_transfer_engine.live, self.model_runner.lora_manager
        replace_adapter(live, manager, config, tensors, ledger)
        ledger.faults += live.constants.faults()

    def check_constants(self) -> None:
        """Raise `RuntimeError` for a buffer that is no longer what it was when the engine was built."""
        if faults := self.weight_transfer_engine.live.constants.faults():
            raise RuntimeError("; ".join(map(str, faults)))

    def clear_adapter(self) -> None:
        """Zero the adapter's memory of every layer, also of those that it leaves alone."""
        for wrapper in self.adapted_layers().values():
            for stacked in (*wrapper.lora_a_stacked, *wrapper.lora_b_stacked):
                stacked.zero_()

    def adapted_layers(self) -> dict[str, Any]:
        """Return vLLM's wrappers of layers with room for an adapter, by name."""
        return self.model_runner.lora_manager._adapter_manager.modules

    def pages(self) -> list[Tensor]:
        """Return the memory of the KV cache."""
        return list(tensors_in(self.model_runner.kv_caches))

    @torch.inference_mode()
    def clear_kv_cache(self) -> None:
        """Zero every page: after a forward pass with NaN, a page keeps it until it is overwritten."""
        for page in self.pages():
            page.zero_()

    def held_at_the_end(self, keep_weights: bool) -> tuple[nn.Module, list[torch.UntypedStorage]]:
        """Return the model, and where weights and KV cache lie on a GPU: failed frames or graphs keep them alive.

        Args:
            keep_weights: leave theirs out.
        """
        model: nn.Module = self.model_runner.get_model()
        caches = [
            getattr(self.model_runner, "kv_caches", []),
            *(getattr(one, "kv_cache", []) for one in model.modules()),
        ]
        held = [] if keep_weights else [*model.parameters(), *model.buffers()]
        found = (one.untyped_storage() for one in [*held, *tensors_in(caches)] if one.is_cuda)
        return model, list({storage.data_ptr(): storage for storage in found}.values())

    # ------------------------------------------------------------------------------------------- behind vLLM's server

    def connect_json(self) -> dict[str, Any]:
        """Connect to the outline of the model, give up what another run left, and return what there is here."""
        config = self.vllm_config
        self.abandon_update()
        folder = config.model_config.model
        self.connect(outline(AutoConfig.from_pretrained(folder)))
        return {
            "versions": versions(),
            "config": json.loads((Path(folder) / "config.json").read_text()),
            "longest": config.model_config.max_model_len,
            "workers": config.parallel_config.world_size,
        }

    def outcome_json(self) -> dict[str, Any]:
        """Return what the last publish left: receipts and what was noticed, or the error that ended it."""
        error = self.weight_transfer_engine.error
        if error is not None:
            faults = [[one.kind, one.name, one.detail] for one in getattr(error, "faults", ())]
            return {"error": type(error).__name__, "said": str(error), "faults": faults}
        ledger: ReceivedLedger = self.weight_transfer_engine.ledger
        return {**ledger.told(), "layers": self.weight_transfer_engine.live.formats()}

    def columns_json(self, layer: str, columns: str) -> dict[str, Any]:
        """Return columns "out columns" of a layer's weight as its GEMM multiplies with them, if they are known."""
        found = self.weight_transfer_engine.live.read_columns(layer, json.loads(columns))
        if found is None:
            return {}
        flat = found.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
        dtype = str(found.dtype).removeprefix("torch.")
        return {"bytes": base64.b64encode(flat.tobytes()).decode(), "dtype": dtype, "shape": list(found.shape)}

    def receipts_json(self, names: str) -> dict[str, Any]:
        """Return the receipts of what reads back under some names."""
        live: LiveModel = self.weight_transfer_engine.live
        return {name: list(one) for name, one in read_receipts(live.read_back, json.loads(names)).items()}


def tensors_in(nested: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested lists and tuples."""
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, (list, tuple)):
        for one in nested:
            yield from tensors_in(one)
