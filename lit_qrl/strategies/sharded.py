"""A learner of which every process holds a part (FSDP2), and the strategies that no run here can use."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal

import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_qrl.errors import ConfigError, check_choice, listed
from lit_qrl.network.experts import ExpertList
from lit_qrl.network.shards import own_part, whole
from lit_qrl.network.structure import decoder_layers
from lit_qrl.optim.build import build_optimizer
from lit_qrl.optim.muon import MuonAdamW
from lit_qrl.precision.base import QuantizedPrecision
from lit_qrl.precision.deferred import deferred_weights
from lit_qrl.precision.layers.packed_linear import PackedLinear
from lit_qrl.run.checkpoint_files import (
    FOLDER,
    parts_of,
    read_checkpoint,
    read_parts,
    remove_unused,
    shapes_of,
    state_key,
    take_parts,
    weight_key,
    write_parts,
    written_states,
)
from lit_qrl.run.description import Described

SHARDED = (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)
WHOLE_MATRICES = ("Muon", "LBFGS", "SparseAdam", "Adafactor")
"""Optimizers of torch whose step on a part of a matrix is not the part of the step."""


class ShardedStrategy(Described, ModelParallelStrategy):
    """Divides weights, gradients and optimizer state over all processes (FSDP2): every process trains on its own rows.

    A decoder layer's weights are whole only while it computes. The learner is in fp32, of which every process holds its
    part, and computes in `compute_dtype`. A publish gathers tensor by tensor, so that each process's engine gets the
    whole sampler; a checkpoint is gathered on the first process and is the one that any other strategy writes, so that
    a run goes on with any number of processes and `lit-qrl export` reads it.

    Args:
        compute_dtype: of the learner's forward and backward pass; gradients are summed over processes in fp32.
        offload: keep parts, gradients and optimizer state in the host's memory, and step there.
        packed_base: a base that `NVFP4LoRA` packs is held by every process (`replicated`), or in parts of which a
            layer's are gathered for each of its products (`sharded`).
        distributed_checkpoints: every process writes its parts (DCP) into a folder beside the checkpoint's file, while
            the run waits; any number of processes, with any strategy, and `lit-qrl export` read it.
    """

    strategy_name = "sharded"

    def __init__(
        self,
        compute_dtype: Literal["fp32", "bf16"] = "bf16",
        offload: bool = False,
        packed_base: Literal["replicated", "sharded"] = "replicated",
        distributed_checkpoints: bool = False,
    ) -> None:
        super().__init__(
            tensor_parallel_size=1,  # pyright: ignore[reportCallIssue]
            save_distributed_checkpoint=False,  # pyright: ignore[reportCallIssue]
            process_group_backend="cpu:gloo,cuda:nccl" if offload else None,  # pyright: ignore[reportCallIssue]
        )
        check_choice("trainer.strategy.compute_dtype", compute_dtype, ("fp32", "bf16"))
        check_choice("trainer.strategy.packed_base", packed_base, ("replicated", "sharded"))
        self.compute_dtype, self.offload, self.packed_base = compute_dtype, offload, packed_base
        self.distributed_checkpoints = distributed_checkpoints
        self._parts: Path | None = None

    @property
    def lightning_restore_optimizer(self) -> bool:
        """True: checkpoints are read as those of any strategy are."""
        return True

    def setup_environment(self) -> None:
        """Make one mesh of all processes."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def check(self, module: Any) -> None:
        """Raise `ConfigError` for what cannot be trained in parts, before weights are loaded.

        Args:
            module: the `GRPOModule`.
        """
        policy = module.policy
        plugin = self.precision_plugin
        if isinstance(plugin, QuantizedPrecision) and plugin.share_weights:
            raise ConfigError(
                f"{type(plugin).__name__} cannot share its base with the engine under ShardedStrategy, which divides "
                "the other weights of the learner.",
                expected="share_weights: false; the packed base is held once in each process, beside the engine's",
                given="share_weights: true",
                remedy="Set it to false, or trainer.strategy to ddp.",
            )
        if isinstance(plugin, HalfPrecision):
            raise ConfigError(
                "ShardedStrategy keeps the learner in fp32, and trainer.precision would make all of it 16-bit.",
                expected="trainer.precision: null; trainer.strategy.compute_dtype says what is computed in",
                given=plugin.precision,
                remedy="Add --trainer.precision null.",
            )
        if policy.dtype not in ("auto", "fp32"):
            raise ConfigError(
                "ShardedStrategy keeps the learner in fp32, divided, and computes in compute_dtype.",
                expected="model.policy.dtype: auto or fp32",
                given=policy.dtype,
                remedy=f"Set it, and trainer.strategy.compute_dtype to {'bf16' if policy.dtype == 'bf16' else 'fp32'}.",
            )
        if module.objective.kl_coefficient and (module.objective.diverges or policy.reference_config is not None):
            raise ConfigError(
                "ShardedStrategy divides the learner's own reference alone, and of that gives the drawn tokens' "
                "log-probs.",
                expected="model.policy.reference: null, and objective.kl_estimator k1, k2, k3 or k3+",
                given=f"{getattr(policy.reference_config, 'name_or_path', None)} and {module.objective.kl_estimator}",
                remedy="Set trainer.strategy to ddp.",
            )
        if policy.batch_invariant:
            raise ConfigError(
                "The same bits for any batch are made for whole weights, and ShardedStrategy divides them.",
                expected="data.engine.batch_invariant: false",
                given="true",
                remedy="Set it, or trainer.strategy to ddp.",
            )
        if self.offload and self.root_device.type == "cpu":
            raise ConfigError(
                "trainer.strategy.offload moves the learner to the host, where it is already.",
                expected="an accelerator, or offload: false",
                given=str(self.root_device),
            )
        made = build_optimizer(module.optimizer, [("trial", nn.Parameter(torch.zeros(2, 2)))])
        alone = type(made).__module__.startswith("torch.optim") and type(made).__name__ not in WHOLE_MATRICES
        if not (alone or isinstance(made, MuonAdamW)):
            raise ConfigError(
                f"{type(made).__name__} may need whole matrices, and under ShardedStrategy each process has a part.",
                expected="MuonAdamW, or one of torch that steps on each weight alone, such as torch.optim.AdamW",
                given=type(made).__name__,
                remedy="Set model.optimizer, or trainer.strategy to ddp.",
            )

    # --------------------------------------------------------------------------------------------------------- weights

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Let the policy leave its weights where they are until `shard` asks for a layer's, on the device."""
        with deferred_weights(whole_policies=True), self.root_device:
            yield

    def shard(self, policy: Any) -> None:
        """Divide a policy that was just configured, a decoder layer after the other, and its reference.

        Args:
            policy: with its modules; weights that were deferred are read here, each layer's just before it is divided.
        """
        if isinstance(policy, FSDPModule):
            return
        plugin = self.precision_plugin
        if isinstance(plugin, QuantizedPrecision):
            # FSDP keeps hold of the modules that it divides: swapped before, they are not when Lightning asks again.
            dtype = torch.bfloat16 if self.compute_dtype == "bf16" else torch.float32
            plugin.gather_in(self.lightning_module, dtype)  # pyright: ignore[reportArgumentType]
        if self.packed_base == "sharded":
            divide_packed(policy.network, self.device_mesh["data_parallel"].get_group())
        roots, deferred = (policy, *policy.frozen_copies), policy.deferred
        # A layer of the learner and of its reference, which are the same numbers until the first step, one after the
        # other; what is in no layer comes last.
        for same in zip(*((*decoder_layers(root.network)[1], root) for root in roots), strict=True):
            for module in (module for part in same for module in part.modules()):
                if deferred is not None:
                    deferred.fill(module)
            for number, part in enumerate(same):
                self._divide(part, trains=number == 0)
        policy.deferred = None

    def _divide(self, part: nn.Module, trains: bool) -> None:
        for module in part.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or isinstance(parameter, DTensor):
                    continue
                if not trains and parameter.requires_grad:  # the learner's own until here
                    parameter = nn.Parameter(parameter.detach(), requires_grad=False)
                    module.register_parameter(name, parameter)
                # What an adapter's or a checkpoint's own dtype is, the parts are fp32.
                if parameter.is_floating_point():
                    parameter.data = parameter.data.float()
        fully_shard(
            part,
            mesh=self.device_mesh["data_parallel"],
            mp_policy=MixedPrecisionPolicy(
                param_dtype=torch.bfloat16 if self.compute_dtype == "bf16" else None, reduce_dtype=torch.float32
            ),
            offload_policy=CPUOffloadPolicy() if self.offload else OffloadPolicy(),
            # The root's too: between two passes every parameter is the part that the optimizer steps on.
            reshard_after_forward=True,
        )

    def model_to_device(self) -> None:
        """Move what is not divided; parts that are kept on the host stay there."""
        module: Any = self.lightning_module
        if not self.offload:
            super().model_to_device()
            return
        for child in module.children():
            if child is not module.policy:
                child.to(self.root_device)

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole weights on the first process, nothing on others; or on each its parts of them."""
        held = self.lightning_module.state_dict()  # pyright: ignore[reportOptionalMemberAccess]
        return held if self.distributed_checkpoints else self._collected(held)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's whole state on the first process, on others its settings; or on each its parts."""
        found = getattr(optimizer, "_optimizer", optimizer).state_dict()
        if self.distributed_checkpoints:
            return {**found, "state": {index: dict(kept) for index, kept in found["state"].items()}}
        return {**found, "state": self._collected(found["state"])}

    def _collected(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        collected = {}
        for name, value in values.items():
            if isinstance(value, Mapping):
                value = self._collected(value)
            elif isinstance(value, Tensor):
                value = whole(value)
                value = value.cpu() if self.is_global_zero else None
            if self.is_global_zero:
                collected[name] = value
        return collected

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write what is divided where that is asked for, and let the first process write the rest."""
        if not self.distributed_checkpoints:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = Path(self.broadcast(filepath))
        folder: Path = self.broadcast(path.parent / f"parts-{checkpoint['global_step']}-{token_hex(4)}")
        write_parts(take_parts(checkpoint), folder)
        checkpoint[FOLDER] = folder.name
        super().save_checkpoint(checkpoint, path, storage_options)
        if self.is_global_zero:
            remove_unused(path.parent, folder)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the checkpoint, mapped from the file; parts in a folder are left there until they are asked for.

        Args:
            checkpoint_path: its file.
            weights_only: no effect; nothing else is read.
        """
        torch.cuda.empty_cache()
        path = self.broadcast(checkpoint_path)
        found = read_checkpoint(path)
        self._parts = parts_of(found, path)
        return found

    @torch.no_grad()
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take this process's part of every weight."""
        saved, own = checkpoint["state_dict"], self.lightning_module.state_dict()  # pyright: ignore
        if self._parts is not None:
            written = shapes_of(self._parts)
            divided = {name: held for name, held in own.items() if weight_key(name) in written}
            read_parts({weight_key(name): held for name, held in divided.items()}, self._parts)
            saved = {**saved, **divided}
        if strict and saved.keys() != own.keys():
            names = listed(sorted(saved.keys() ^ own.keys()))
            raise RuntimeError(f"The checkpoint's weights are others than the model's: {names}")
        for name, held in own.items():
            if name in saved and not isinstance(saved[name], DTensor):  # what a frozen base has is its own already
                held.copy_(own_part(saved[name], held))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this process's part of what the optimizers keep of every weight."""
        for number, (optimizer, saved) in enumerate(zip(self.optimizers, checkpoint["optimizer_states"], strict=True)):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if self._parts is not None:
                places = list(written_states(shapes_of(self._parts), number))
                made = {place: torch.zeros_like(parameters[place[0]]) for place in places}
                read_parts({state_key(number, *place): part for place, part in made.items()}, self._parts)
                for (index, name), part in made.items():
                    saved["state"][index][name] = part
            state = {
                index: {
                    name: own_part(value, parameters[index])
                    if isinstance(value, Tensor) and value.shape == parameters[index].shape
                    else value
                    for name, value in kept.items()
                }
                for index, kept in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": state})


def divide_packed(network: nn.Module, group: Any) -> None:
    """Leave to each process of a group its part of every packed layer.

    Raises:
        ConfigError: for a network without any, or with packed experts.
    """
    layers = [part for part in network.modules() if isinstance(part, PackedLinear)]
    if not layers:
        raise ConfigError(
            "trainer.strategy.packed_base divides a base that is packed, and the policy has none.",
            expected="NVFP4LoRA in trainer.plugins, or packed_base: replicated",
            given="packed_base: sharded",
        )
    if any(isinstance(part, ExpertList) for part in network.modules()):
        raise ConfigError(
            "Experts of a packed base cannot be divided: processes choose different ones, and all would have to "
            "gather each.",
            expected="packed_base: replicated",
            given="packed_base: sharded",
            remedy="Set trainer.strategy.packed_base to replicated.",
        )
    for layer in layers:
        layer.divide(group)


def check_strategy(strategy: Strategy) -> None:
    """Raise `ConfigError` for a strategy other than ours that shards the learner.

    A publish reads whole weights, a checkpoint holds whole tensors and the optimizers here see whole matrices; under
    these strategies each rank would publish, sample from and save its own part.

    Args:
        strategy: of the Trainer.
    """
    if isinstance(strategy, SHARDED) and not isinstance(strategy, ShardedStrategy):
        raise ConfigError(
            f"{type(strategy).__name__} shards the learner over processes, which a publish to the sampler cannot read.",
            expected="trainer.strategy: ShardedStrategy, which gathers them, or auto, ddp or ColocatedStrategy, under "
            "which every process holds all weights",
            given=type(strategy).__name__,
            remedy="Where one device is too small, take ShardedStrategy, train a LoRA (model.policy.lora), keep the "
            "base packed (NVFP4LoRA), or let engine and learner take turns on it (ColocatedStrategy).",
        )
