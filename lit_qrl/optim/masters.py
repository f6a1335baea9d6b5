"""Weights of 16 bits that are trained as fp32: the bits that the model does not see are kept beside them."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_qrl.errors import ConfigError
from lit_qrl.functional._launch import triton_installed
from lit_qrl.optim.build import build_optimizer

log = logging.getLogger(__name__)

BUCKET_ELEMENTS = 2**26
"""Weights whose fp32 form exists at a time: 256 MiB, and as much for their gradients; a larger matrix is alone."""
HALF_A_STEP, NAN_BITS = 2**15, 0x7FC00000
ADAMS_MOMENTS = ("exp_avg", "exp_avg_sq")


def split(master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the nearest 16-bit numbers of fp32 weights, and the int16 from which `join` has the weights again.

    For bf16, bits(master) = bits(weight) · 2¹⁶ + low, exactly; a number halfway between two goes away from zero, since
    rounding to even would need 65,537 values of `low`. For fp16, master = weight + low · 2⁻¹⁶ · ulp(weight), exact
    where the weight is a normal number (6·10⁻⁵ and above) and within 2⁻⁴⁰ below.

    Args:
        master: fp32, any shape.
        dtype: bf16 or fp16.

    >>> weight, low = split(torch.tensor([1.0, 1.0 + 2**-20]), torch.bfloat16)
    >>> weight.tolist(), low.tolist()
    ([1.0, 1.0], [0, 8])
    """
    if dtype == torch.bfloat16:
        bits = torch.where(master.isnan(), NAN_BITS, master.view(torch.int32))
        upper = (bits + HALF_A_STEP) >> 16
        return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)
    weight = master.to(torch.float16)
    low = ((master - weight.float()) / _unit(weight)).round_().clamp_(-(2**15), 2**15 - 1)
    return weight, low.nan_to_num_(0.0).to(torch.int16)


def join(weight: Tensor, low: Tensor) -> Tensor:
    """Return the fp32 weights that `split` took apart.

    Args:
        weight: bf16 or fp16.
        low: int16, of its shape.

    >>> join(torch.ones(1, dtype=torch.bfloat16), torch.tensor([8], dtype=torch.int16)).item() == 1 + 2**-20
    True
    """
    if weight.dtype == torch.bfloat16:
        return ((weight.view(torch.int16).to(torch.int32) << 16) + low).view(torch.float32)
    return weight.float() + low * _unit(weight)


def _unit(weight: Tensor) -> Tensor:
    """Return 2⁻¹⁶ of the distance between fp16 numbers around each weight."""
    exponent = ((weight.view(torch.int16).to(torch.int32) >> 10) & 31).clamp_(min=1)
    # fp16 counts exponents from −15 and has 10 digits behind the point, fp32 from −127.
    return ((exponent - 15 - 10 - 16 + 127) << 23).view(torch.float32)


def is_rounded(parameter: Tensor) -> bool:
    """Return whether a parameter's numbers have fewer than 32 bits, so that small updates are lost in them."""
    return parameter.is_floating_point() and parameter.element_size() < 4


class MasterWeights(Optimizer):
    """Lets an optimizer step on fp32 weights of which the parameters hold the nearest bf16 or fp16 numbers.

    The missing 16 bits of each weight are this optimizer's state, 2 bytes a parameter. A step reconstructs weights and
    gradients in fp32 a bucket at a time, lets the inner optimizer step on these, and splits them again, so forward and
    backward pass, publish and checkpoint see the 16-bit parameters that they always saw, and no fp32 copy of the model
    exists. Groups are those of the inner optimizer over the parameters themselves: schedulers, clipping, loss scalers
    and `zero_grad` act on these. What an inner optimizer counts in its groups, it counts once a step.

    Args:
        named: pairs of name and parameter; those of 32 bits are stepped on as they are.
        build: makes the inner optimizer from such pairs; any that skips parameters without a gradient.
        bucket_elements: weights whose fp32 form exists at a time.

    >>> weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> optimizer = MasterWeights([("w", weight)], lambda named: torch.optim.SGD(named, lr=2**-12))
    >>> weight.grad = torch.ones_like(weight)
    >>> optimizer.step()
    >>> weight.tolist(), optimizer.master(weight).tolist()
    ([1.0, 1.0], [0.999755859375, 0.999755859375])
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        build: Callable[[Any], Optimizer],
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        # What the inner optimizer holds: of the parameter's shape and device, with a storage of one number.
        stands_for: dict[nn.Parameter, nn.Parameter] = {}
        pairs = []
        for name, parameter in named:
            inner = nn.Parameter(torch.zeros((), device=parameter.device).expand(parameter.shape))
            stands_for[inner] = parameter
            pairs.append((name, inner))
        self.inner = build(pairs)
        self.bucket_elements = bucket_elements
        groups = [
            {**group, "params": [stands_for[inner] for inner in group["params"]]} for group in self.inner.param_groups
        ]
        super().__init__(groups, dict(self.inner.defaults))
        for parameter in self._parameters():
            if is_rounded(parameter):
                self.state[parameter] = {"low": torch.zeros_like(parameter, dtype=torch.int16)}

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Return each parameter with what the inner optimizer holds for it."""
        inner = [one for group in self.inner.param_groups for one in group["params"]]
        return list(zip(self._parameters(), inner, strict=True))

    def master(self, parameter: nn.Parameter) -> Tensor:
        """Return the fp32 weights of a parameter; of one of 32 bits, its own."""
        held = parameter.detach()
        if not is_rounded(parameter):
            return held
        return join(held, self.state[parameter]["low"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step on the fp32 weights and return what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _copy_settings(self.param_groups, self.inner.param_groups)
        before = [dict(group) for group in self.inner.param_groups]
        done = self._step_in_one_pass()
        for bucket in self._buckets(done):
            _copy_settings(before, self.inner.param_groups)
            with self._raised(bucket):
                self.inner.step()
        _copy_settings(self.inner.param_groups, self.param_groups)
        return loss

    def _step_in_one_pass(self) -> set[nn.Parameter]:
        """Take Adam's step by a kernel that joins weights and takes them apart in passing, and return whose."""
        if type(self.inner) not in (torch.optim.Adam, torch.optim.AdamW):
            return set()
        done: set[nn.Parameter] = set()
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            if not _plain_adam(group):
                continue
            made: dict[Any, Tensor] = {}
            for parameter, inner in zip(group["params"], inner_group["params"], strict=True):
                grad = parameter.grad
                if grad is None or not _in_one_pass(parameter) or not grad.is_contiguous() or grad.is_sparse:
                    continue
                from lit_qrl.optim import masters_triton

                state = self.inner.state[inner]
                if not state:
                    moments = {name: torch.zeros_like(parameter, dtype=inner.dtype) for name in ADAMS_MOMENTS}
                    state.update(step=torch.tensor(0.0), **moments)
                state["step"] += 1
                step = state["step"].item(), parameter.device
                if step not in made:
                    made[step] = masters_triton.adam_settings(
                        parameter.device, step=step[0], lr=float(group["lr"]), betas=group["betas"], eps=group["eps"],
                        weight_decay=group["weight_decay"],
                        decoupled=group.get("decoupled_weight_decay", type(self.inner) is torch.optim.AdamW),
                    )  # fmt: skip
                low, (average, square) = self.state[parameter]["low"], (state[name] for name in ADAMS_MOMENTS)
                masters_triton.adam(parameter.detach(), low, grad, average, square, made[step])
                torch.autograd.graph.increment_version(parameter)
                done.add(parameter)
        return done

    def _buckets(self, done: set[nn.Parameter]) -> Iterator[list[tuple[nn.Parameter, nn.Parameter]]]:
        bucket, size = [], 0
        for parameter, inner in self._pairs():
            if parameter.grad is None or parameter in done:
                continue
            if bucket and size + parameter.numel() > self.bucket_elements:
                yield bucket
                bucket, size = [], 0
            bucket.append((parameter, inner))
            size += parameter.numel()
        if bucket:
            yield bucket

    @contextmanager
    def _raised(self, bucket: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> Iterator[None]:
        """Give the inner optimizer weights and gradients of a bucket in fp32, and take the weights back."""
        empty = [inner.data for _, inner in bucket]
        try:
            for parameter, inner in bucket:
                assert parameter.grad is not None
                inner.data = self.master(parameter)
                inner.grad = parameter.grad.to(inner.dtype)
            yield
            for parameter, inner in bucket:
                if is_rounded(parameter):
                    weight, low = split(inner.data, parameter.dtype)
                    parameter.copy_(weight)
                    self.state[parameter]["low"].copy_(low)
                else:  # written in place, under another name
                    torch.autograd.graph.increment_version(parameter)
        finally:
            for (_, inner), nothing in zip(bucket, empty, strict=True):
                inner.grad, inner.data = None, nothing

    def state_dict(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the inner optimizer's state, and the low bits in the order of its parameters."""
        _copy_settings(self.param_groups, self.inner.param_groups)
        lows = [self.state[one]["low"] if is_rounded(one) else None for one in self._parameters()]
        return {**self.inner.state_dict(), "masters": lows}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state; from one of an optimizer without masters, with the parameters themselves."""
        self.inner.load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})
        parameters = self._parameters()
        lows = state_dict.get("masters") or [None] * len(parameters)
        for parameter, low in zip(parameters, lows, strict=True):
            if is_rounded(parameter):
                own = self.state[parameter]["low"]
                _ = own.zero_() if low is None else own.copy_(low)
        _copy_settings(self.inner.param_groups, self.param_groups)


def saved_masters(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the fp32 weights that a run trained in 16 bits, by their names in its checkpoint; none of other runs.

    Args:
        checkpoint: as `read_checkpoint` returns it.
    """
    found: dict[str, Tensor] = {}
    for state in checkpoint.get("optimizer_states", ()):
        names = [name for group in state["param_groups"] for name in group["param_names"]]
        for name, low in zip(names, state.get("masters") or [None] * len(names), strict=True):
            if low is not None:
                found[name] = join(checkpoint["state_dict"][name], low)
    return found


def _in_one_pass(parameter: Tensor) -> bool:
    """Return whether the kernel takes a parameter; a part of a sharded one is none."""
    plain = parameter.device.type == "cuda" and parameter.dtype == torch.bfloat16 and parameter.is_contiguous()
    return plain and type(parameter.data) is Tensor and triton_installed("masters")


def _plain_adam(group: dict[str, Any]) -> bool:
    """Return whether a group of Adam's asks for nothing that the kernel does not do."""
    switches = ("amsgrad", "maximize", "capturable", "differentiable", "fused")
    numbers = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    return not any(group.get(name) for name in switches) and not any(isinstance(one, Tensor) for one in numbers)


def _copy_settings(source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Make the settings of groups those of others; each keeps its own parameters."""
    for given, group in zip(source, target, strict=True):
        kept = group["params"]
        group.clear()
        group.update(given, params=kept)


def trained_by(
    optimizer: Callable[[Any], Optimizer], named: Sequence[tuple[str, nn.Parameter]], masters: bool, scaler: Any = None
) -> Optimizer:
    """Return the optimizer of a run: over fp32 masters where a parameter has fewer than 32 bits, unless refused.

    Args:
        optimizer: as configured.
        named: pairs of name and trained parameter.
        masters: False trains 16-bit weights as they are, with a warning.
        scaler: the loss scaler of the precision plugin, or None.

    Raises:
        ConfigError: for fp16 weights under a loss scaler, or an optimizer that cannot be built.
    """
    dtypes = {parameter.dtype for _, parameter in named if is_rounded(parameter)}
    if scaler is not None and torch.float16 in dtypes:
        raise ConfigError(
            "A loss scaler takes no gradients in fp16.",
            expected="weights in fp32 or bf16 under trainer.precision: 16-mixed",
            given="model.policy.dtype: fp16",
            remedy="Set model.policy.dtype to fp32, or trainer.precision to 16-true.",
        )
    build = partial(build_optimizer, optimizer)
    if not dtypes:
        return build(named)
    if masters:
        return MasterWeights(named, build)
    log.warning(
        "model.master_weights is false: weights in %s round each update, and lose what is below half a step of theirs, "
        "which of a usual rate is most of it. Leave model.master_weights true, or set model.policy.dtype to fp32.",
        " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)),
    )
    return _in_one_kernel(build(named))


def _in_one_kernel(optimizer: Optimizer) -> Optimizer:
    """Let torch's Adam over 16-bit weights on a GPU take its own kernel, unless its settings say which way it goes.

    It computes in fp32 and rounds once, where the default rounds after each operation.
    """
    for group in optimizer.param_groups if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) else ():
        free = group.get("fused") is None and group.get("foreach") is None and _plain_adam(group)
        if free and all(parameter.device.type == "cuda" for parameter in group["params"]):
            group["fused"] = True
    return optimizer
