"""What a GPU still has room for, and how many decoder layers may keep what their backward pass reads."""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lit_qrl.network.hidden import recomputation
from lit_qrl.network.structure import body, decoder_layers

RESERVE = 0.05
"""Share of a GPU's memory that stays free, for fragments and for libraries' work space."""
MEASURED = 2
"""Passes on which what a layer holds is measured."""
TRANSIENT = 3
"""Layers' worth of activations that the backward pass of one layer takes besides what is kept."""
HEAD = 2**30
"""Bytes for a chunk of logits, both ways, at least: it has a share of a GPU's memory."""
HEAD_SHARE = 1 / 40


def free_memory(device: torch.device) -> int:
    """Return the bytes of a GPU that new tensors can take: the driver's free ones, and torch's own that hold nothing.

    After the first update torch keeps what gradients and activations took; to the driver that is in use. Where this
    process has a limit (`MemoryLimit`), it is what that leaves, if less.

    Args:
        device: a GPU.
    """
    allocated = torch.cuda.memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    limit = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free + torch.cuda.memory_reserved(device) - allocated, limit - allocated)


def room_for_logits(hidden: Tensor, head: Tensor) -> int:
    """Return how many bytes of logits may stay from the forward pass for the backward pass, which begins with them.

    Nothing else grows in between, and what the layers' backward passes take comes after; so all that is free may be
    taken, but for the reserve and what the head's own gradient needs: its 16 bits, and the fp32 sum over chunks.

    Args:
        hidden: the head's input.
        head: the output embedding.
    """
    if hidden.device.type != "cuda" or not torch.is_grad_enabled():
        return 0
    gradient = 6 * head.numel() if head.requires_grad else 0
    return max(int(free_memory(hidden.device) - RESERVE * _total(hidden.device)) - gradient, 0)


def kept_layers(layers: int, tokens: int, each: float, width: int, free: int, gradients: int, total: int) -> int:
    r"""Return how many of $L$ decoder layers may keep their activations, so that they need not be computed again.

    $k = \lfloor (F - 0.05\,T - G - H - n (L h + 3 a)) / (n (a - h)) \rfloor$, in 0 … L.

    Args:
        layers: $L$.
        tokens: $n$ of the forward pass.
        each: $a$, bytes a token that a kept layer holds, its output among them.
        width: $h$, bytes a token of a layer's output, which is held in any case.
        free: $F$, bytes that can be allocated.
        gradients: $G$, bytes of gradients, and of weights' copies, that are still to be made.
        total: $T$, bytes of the device; $H$ are a fortieth of it for logits, and 1 GiB at least.

    >>> kept_layers(28, tokens=8192, each=100_000, width=3072, free=30 << 30, gradients=3 << 30, total=80 << 30)
    24
    """
    room = (
        free
        - RESERVE * total
        - gradients
        - max(HEAD, HEAD_SHARE * total)
        - tokens * (layers * width + TRANSIENT * each)
    )
    return int(min(max(room // (tokens * max(each - width, 1.0)), 0), layers))


def compute_again(network: Any, layers: bool | Literal["auto"], on_cpu: bool) -> "SelectiveRecomputation | None":
    """Let the backward pass compute decoder layers again: all, none, or those whose activations do not fit.

    It returns what chooses the last, if anything does.

    Args:
        network: a causal language model.
        layers: as `gradient_checkpointing` of `CausalPolicy`.
        on_cpu: where `auto` means none.
    """
    if not layers or (layers == "auto" and on_cpu):
        return None
    new = getattr(network, "activation_checkpointing_enable", None)  # from transformers 5.23 on
    (new or network.gradient_checkpointing_enable)({"use_reentrant": False, "context_fn": recomputation})
    return SelectiveRecomputation(network) if layers == "auto" else None


class SelectiveRecomputation:
    """Lets as many decoder layers as fit keep their activations; the others are computed again from their inputs.

    A kept layer is spared its second forward pass, a quarter of its arithmetic. The number follows from each forward
    pass's tokens and the memory that is free before it. What a layer holds is measured on the first two: that after a
    step may make copies of weights, as in few bits, which the others find; what it holds more is taken for these. The
    last layers are kept, which give their memory back first. On a CPU, and where weights are in parts, none is.

    Args:
        network: a causal language model with gradient checkpointing enabled.
    """

    def __init__(self, network: Any) -> None:
        self.network: Any = network
        self.layers: list[Any] = list(decoder_layers(network)[1])
        self.kept = 0
        """How many of the last layers are not computed again."""
        self._each: float | None = None
        self._copies = 0.0
        """Bytes of a layer that its first pass after a step makes beside what is kept for the backward pass."""
        self._first = (0, 0)
        """Bytes and tokens of the first pass."""
        self._passes = self._tokens = self._width = 0
        for index, layer in enumerate(self.layers):
            layer._gradient_checkpointing_func = partial(self._run, index, layer._gradient_checkpointing_func)
        body(network).register_forward_pre_hook(self._choose, with_kwargs=True)

    def _run(self, index: int, checkpoint: Any, function: Any, *args: Any) -> Any:
        if index < len(self.layers) - self.kept:
            return checkpoint(function, *args)
        measures = self._passes <= MEASURED and torch.is_grad_enabled()
        return self._measured(function, *args) if measures else function(*args)

    @property
    def again(self) -> int:
        """How many layers the last pass computes again."""
        return len(self.layers) - self.kept

    def _measured(self, function: Any, *args: Any) -> Any:
        """Call a layer and remember what it holds for the backward pass."""
        device = args[0].device
        self._width, before = args[0].shape[-1] * args[0].element_size(), torch.cuda.memory_allocated(device)
        output = function(*args)
        held = torch.cuda.memory_allocated(device) - before
        self._each = each = held / self._tokens
        if self._passes == 1:
            self._first = held, self._tokens
        self._copies = max(self._first[0] - each * self._first[1], 0.0)
        return output

    def _choose(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trained = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        if not torch.is_grad_enabled() or not trained:
            return
        self._passes += 1
        self._tokens = (kwargs["input_ids"] if "input_ids" in kwargs else args[0]).numel()
        if not _on_one_gpu(trained):
            self.kept = 0
        elif self._each is None:
            self.kept = 1  # which is measured
        else:
            device = trained[0].device
            gradients = sum(parameter.nbytes for parameter in trained if parameter.grad is None)
            copies = int(self._copies * len(self.layers)) if gradients else 0  # of the first pass after a step
            self.kept = kept_layers(
                layers=len(self.layers),
                tokens=self._tokens,
                each=self._each,
                width=self._width,
                free=free_memory(device),
                gradients=gradients + copies,
                total=_total(device),
            )


def _on_one_gpu(parameters: list[nn.Parameter]) -> bool:
    return not any(isinstance(one, DTensor) or one.device.type != "cuda" for one in parameters)


def _total(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory
