"""A learner of which every process holds a part (FSDP2), and the strategies that no run here can use."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_qrl.errors import ConfigError, listed
from lit_qrl.network.shards import own_part, whole
from lit_qrl.network.structure import decoder_layers
from lit_qrl.optim.build import build_optimizer
from lit_qrl.precision.deferred import deferred_weights
from lit_qrl.precision.source import PublishingPrecision
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
    """

    strategy_name = "sharded"

    def __init__(self, compute_dtype: Literal["fp32", "bf16"] = "bf16", offload: bool = False) -> None:
        if compute_dtype not in ("fp32", "bf16"):
            what = "trainer.strategy.compute_dtype is unknown."
            raise ConfigError(what, expected="fp32 or bf16", given=compute_dtype)
        super().__init__(
            tensor_parallel_size=1,  # pyright: ignore[reportCallIssue]
            save_distributed_checkpoint=False,  # pyright: ignore[reportCallIssue]
            process_group_backend="cpu:gloo,cuda:nccl" if offload else None,  # pyright: ignore[reportCallIssue]
        )
        self.compute_dtype, self.offload = compute_dtype, offload

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
        if isinstance(self.precision_plugin, PublishingPrecision):
            raise ConfigError(
                f"{type(self.precision_plugin).__name__} computes on whole weights, and ShardedStrategy divides them.",
                expected="no plugin in trainer.plugins; publisher.format quantizes the sampler all the same",
                given=type(self.precision_plugin).__name__,
                remedy="Remove the plugin, or set trainer.strategy to ddp.",
            )
        if policy.packed_format is not None:
            raise ConfigError(
                "A packed base is not divided over processes.",
                expected="a model folder in fp32, bf16 or fp16",
                given=policy.packed_format.name,
                remedy="Take the plain model, or set trainer.strategy to ddp.",
            )
        if policy.dtype not in ("auto", "fp32"):
            raise ConfigError(
                "ShardedStrategy keeps the learner in fp32, divided, and computes in compute_dtype.",
                expected="model.policy.dtype: auto or fp32",
                given=policy.dtype,
                remedy=f"Set it, and trainer.strategy.compute_dtype to {'bf16' if policy.dtype == 'bf16' else 'fp32'}.",
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
        if not type(made).__module__.startswith("torch.optim") or type(made).__name__ in WHOLE_MATRICES:
            raise ConfigError(
                f"{type(made).__name__} may need whole matrices, and under ShardedStrategy each process has a part.",
                expected="an optimizer of torch that steps on each weight alone, such as torch.optim.AdamW",
                given=type(made).__name__,
                remedy="Set model.optimizer, or trainer.strategy to ddp.",
            )

    # --------------------------------------------------------------------------------------------------------- weights

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Let the policy leave its weights where they are until `shard` asks for them, layer by layer."""
        module: Any = self.lightning_module
        # The copy that a KL needs is made of whole weights.
        copied = module.objective.kl_coefficient > 0 and module.policy.lora is None
        waiting: AbstractContextManager[None] = nullcontext() if copied else deferred_weights(whole_policies=True)
        with waiting:
            yield

    def shard(self, policy: Any) -> None:
        """Divide a policy that was just configured, a decoder layer after the other, and its reference.

        Args:
            policy: with its modules; weights that were deferred are read here, each layer's just before it is divided.
        """
        if isinstance(policy, FSDPModule):
            return
        self._divide(policy, policy.network, policy.deferred)
        policy.deferred = None
        for reference in policy.frozen_copies:
            self._divide(reference, reference.network, None)

    def _divide(self, root: Any, network: Any, deferred: Any) -> None:
        options: dict[str, Any] = {
            "mesh": self.device_mesh["data_parallel"],
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=torch.bfloat16 if self.compute_dtype == "bf16" else None, reduce_dtype=torch.float32
            ),
            "offload_policy": CPUOffloadPolicy() if self.offload else OffloadPolicy(),
            # The root's too: between two passes every parameter is the part that the optimizer steps on.
            "reshard_after_forward": True,
        }
        for part in (*decoder_layers(network)[1], root):
            if deferred is not None:
                for module in part.modules():
                    deferred.fill(module)
            # What an adapter's or a checkpoint's own dtype is, the parts are fp32.
            for parameter in part.parameters():
                if parameter.is_floating_point() and not isinstance(parameter, DTensor):
                    parameter.data = parameter.data.float()
            fully_shard(part, **options)

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
        """Return the whole weights on the first process, nothing on others; one is gathered at a time."""
        return self._collected(self.lightning_module.state_dict())  # pyright: ignore[reportOptionalMemberAccess]

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's whole state on the first process; on others its settings alone."""
        found = getattr(optimizer, "_optimizer", optimizer).state_dict()
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

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the checkpoint, mapped from the file."""
        torch.cuda.empty_cache()
        return torch.load(
            self.broadcast(checkpoint_path), map_location="cpu", mmap=True, weights_only=bool(weights_only)
        )

    @torch.no_grad()
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take this process's part of every weight."""
        saved, own = checkpoint["state_dict"], self.lightning_module.state_dict()  # pyright: ignore
        if strict and saved.keys() != own.keys():
            names = listed(sorted(saved.keys() ^ own.keys()))
            raise RuntimeError(f"The checkpoint's weights are others than the model's: {names}")
        for name, held in own.items():
            if name in saved and not isinstance(saved[name], DTensor):  # what a frozen base has is its own already
                held.copy_(own_part(saved[name], held))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this process's part of what the optimizers keep of every weight."""
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            state = {
                number: {
                    name: own_part(value, parameters[number])
                    if isinstance(value, Tensor) and value.shape == parameters[number].shape
                    else value
                    for name, value in kept.items()
                }
                for number, kept in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": state})


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
