"""The end of a run that cannot go on: a checkpoint where that is safe, one event, and an error that names it.

Of memory that does not suffice it says what was asked for, who has the rest, and what to change.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, NoReturn, TypeVar

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lit_qrl.errors import ConfigError, MemoryShortageError, StoppedError, asked, out_of_memory
from lit_qrl.run.event_log import event
from lit_qrl.run.folder import last_checkpoint, shown


def stop_run(
    trainer: Trainer, kind: str, message: str, *, save: bool = False, error: BaseException | None = None
) -> NoReturn:
    """End the run by a `StoppedError` that names its last checkpoint; the report is made on the way out.

    Memory that runs out before anything was learned is the configuration's: it does not fit.

    Args:
        trainer: the run's.
        kind: of the condition, for the event log.
        message: one sentence for a person.
        save: write a checkpoint first, of before this iteration, where the learner's state is good; one process does.
        error: the cause.

    Raises:
        ConfigError: for memory that has never sufficed.
        StoppedError: otherwise.
    """
    unfit = kind == "out_of_memory" and not has_learned(trainer)
    # Of several processes one alone cannot save: the others would have to take part.
    if save and trainer.world_size == 1 and not unfit:
        for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if saves := getattr(callback, "save_before_update", None):  # of `RunCheckpoint`, or the user's own
                saves(trainer)
    saved = last_checkpoint(trainer.default_root_dir)
    where = f"The last good checkpoint is {shown(saved)}." if saved else "No checkpoint had been written."
    event(trainer, "stopped", f"{message} {where}", cause=kind)
    if unfit:
        raise ConfigError(f"The run does not fit. {message}") from error
    raise StoppedError(f"The run was stopped by the guard: {message} {where}") from error


def has_learned(trainer: Any) -> bool:
    """Return whether this start of a run has taken an optimizer step."""
    first = getattr(getattr(trainer, "lightning_module", None), "first_step", None)
    return first is not None and trainer.global_step > first


REMEDIES = (
    "What helps, what costs least first, where it is not set yet: more data.micro_batches, or where they are auto a "
    "lower data.max_tokens_per_micro_batch; model.policy.gradient_checkpointing: true; a lower gpu_memory_utilization "
    "or cache_gigabytes of data.engine; model.optimizer: bitsandbytes.optim.AdamW8bit; trainer.strategy: "
    "ShardedStrategy over more GPUs, or with offload: true; an adapter instead of all weights (model.policy.lora)."
)
GIB = 2**30
Method = TypeVar("Method", bound=Callable[..., Any])


def fits(doing: str) -> Callable[[Method], Method]:
    """Return a decorator of a LightningModule's methods: where memory runs out in one, the run ends by a paragraph.

    Args:
        doing: the work, after "while"; the innermost such method names it.
    """

    def around(method: Method) -> Method:
        @wraps(method)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except (RuntimeError, MemoryError) as error:
                stop_where_short(self.trainer, error, f" while {doing}")
                raise

        return guarded  # pyright: ignore[reportReturnType]

    return around


def stop_where_short(trainer: Trainer, error: BaseException, doing: str = "", save: bool = False) -> None:
    """End the run where an error says that memory ran out; return where it says anything else.

    Args:
        trainer: of the run.
        error: the cause.
        doing: the work, as part of a sentence.
        save: as in `stop_run`.

    Raises:
        ConfigError: where the run has not learned anything yet.
        StoppedError: where it has.
    """
    if isinstance(error, MemoryShortageError):
        what, remedy = str(error), ""
    elif out_of_memory(error) and not isinstance(error, StoppedError):
        what, remedy = f"Memory ran out{doing}: {asked(error)}.", REMEDIES
    else:
        return
    message = " ".join(filter(None, (what, in_use(trainer), remedy)))
    stop_run(trainer, "out_of_memory", message, save=save, error=error)


def in_use(trainer: Any) -> str:
    """Return what the learner holds, what its engine may, and how much of a GPU is left to the rest, as a sentence.

    Args:
        trainer: of the run.
    """
    module, device = getattr(trainer, "lightning_module", None), getattr(trainer.strategy, "root_device", None)
    if module is None or device is None:
        return ""
    parameters = list(module.parameters())
    states = tree_leaves([one.state_dict() for one in trainer.optimizers])
    held = {
        "weights": _bytes([*parameters, *module.buffers()], device),
        "gradients": _bytes([one.grad for one in parameters if one.grad is not None], device),
        "optimizer states": _bytes([one for one in states if isinstance(one, Tensor)], device),
    }
    told = ", ".join(f"{_size(size)} of {name}" for name, size in held.items())
    sentence = f"The learner holds {told} on {device}"
    engine = getattr(getattr(trainer, "datamodule", None), "engine", None)
    share = None if engine is None or engine.overlaps else getattr(engine, "gpu_memory_utilization", None)
    if device.type != "cuda":
        return f"{sentence}."
    free, total = torch.cuda.mem_get_info(device)
    rest = total - free - sum(held.values())
    if share is not None:
        sentence += f"; its engine may take {share:g} of the GPU's memory, {_size(share * total)}"
    others = "activations, engine and libraries" if engine is not None and not engine.overlaps else "activations"
    return f"{sentence}; {others} have the rest of what is in use, {_size(max(rest, 0))} of {_size(total)}."


def _bytes(tensors: Iterable[Any], device: torch.device) -> int:
    """Return the bytes of this process's parts of tensors on a device; memory that two share counts once."""
    own = (getattr(one, "_local_tensor", one) for one in tensors)
    return sum({one.data_ptr(): one.numel() * one.element_size() for one in own if one.device == device}.values())


def _size(size: float) -> str:
    """Return a number of bytes in words.

    >>> _size(3 * 2**30), _size(2**19)
    ('3.0 GiB', '0.5 MiB')
    """
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"
