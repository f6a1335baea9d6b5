"""Muon for the hidden matrices, AdamW for everything else."""

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lit_qrl.errors import ConfigError
from lit_qrl.run.description import Described

# Input and output embeddings of the architectures that transformers loads as causal language models.
EMBEDDINGS = ("*embed*", "*wte.*", "*wpe.*", "*lm_head*", "*output_projection*")


class MuonAdamW(Optimizer, Described):
    """Muon for the hidden matrices, AdamW for everything else, as one optimizer.

    The rule of Muon's author (K. Jordan, "Muon: an optimizer for hidden layers in neural networks", 2024):
    two-dimensional weights of hidden layers by Muon; embeddings, the output layer, scalars and vectors by AdamW. A
    LoRA's factors are two-dimensional weights of hidden layers too, so Muon takes them, unless `adamw` also lists
    `*lora_*`. Experts stored as one three-dimensional parameter go to AdamW.

    Muon's step: B ← μB + (1 − μ)g, U = (1 − μ)g + μB, W ← (1 − lr·decay)·W − lr·0.2·√max(out, in)·NS(U). NS, the
    Newton–Schulz iteration, makes the singular values about 1, so the factor 0.2·√max(out, in) of `match_rms_adamw`
    ("Muon is Scalable for LLM Training", arXiv:2502.16982, §2.2) gives the update AdamW's usual root mean square,
    0.2: a rate tuned for AdamW, such as QaRL's 1e-6, serves both.

    Of a matrix that is divided over processes (`DTensor`) each keeps its part, of the momentum too. U is gathered and
    orthogonalized on all of them.

    Args:
        params: pairs of name and parameter, as `named_parameters()` yields them.
        lr: learning rate of both, on AdamW's scale.
        weight_decay: of both, decoupled.
        momentum: of Muon.
        nesterov: Muon's momentum looks ahead.
        ns_steps: Newton–Schulz iterations of Muon.
        adjust_lr_fn: scale of Muon's rate: `match_rms_adamw`, or its author's `original` √max(1, out/in).
        betas: of AdamW.
        eps: of AdamW.
        adamw: globs over parameter names; what matches is AdamW's whatever its shape.

    Raises:
        ConfigError: parameters without names, or no matrix for Muon.

    >>> model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 2), "up": torch.nn.Linear(2, 3)})
    >>> [(g["algorithm"], g["param_names"]) for g in MuonAdamW(model.named_parameters(), lr=1e-6).param_groups]
    [('muon', ['up.weight']), ('adamw', ['embed.weight', 'up.bias'])]
    """

    def __init__(
        self,
        params: Iterable[tuple[str, Tensor]],
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adamw: Sequence[str] = EMBEDDINGS,
    ) -> None:
        named: list[Any] = list(params)
        if any(not isinstance(pair, tuple) for pair in named):
            raise ConfigError(
                "MuonAdamW tells embeddings from hidden matrices by their names.",
                expected="pairs of name and parameter",
                given="parameters without names",
                remedy="Pass model.named_parameters().",
            )
        matrices = [pair for pair in named if pair[1].ndim == 2 and not _matches(pair[0], adamw)]
        if not matrices:
            raise ConfigError(
                "MuonAdamW found no hidden matrix to train.",
                expected=f"a two-dimensional parameter whose name matches none of {', '.join(adamw)}",
                given=", ".join(name for name, _ in named[:3]) or "no parameters",
                remedy="Use torch.optim.AdamW, or correct `adamw`.",
            )
        chosen = {name for name, _ in matrices}
        rest = [pair for pair in named if pair[0] not in chosen]
        # Built here once with the settings as arguments, because a group's own are not checked.
        muon = torch.optim.Muon(
            matrices,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
        )
        groups: list[dict[str, Any]] = [{"algorithm": "muon", **muon.param_groups[0]}]
        if rest:
            others = torch.optim.AdamW(rest, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps)
            groups.append({"algorithm": "adamw", **others.param_groups[0]})
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self._link()

    def _link(self) -> None:
        """Let an optimizer of each kind work on this one's groups and state, so that both are saved as one."""
        kinds = {"muon": torch.optim.Muon, "adamw": torch.optim.AdamW}
        self._parts: list[Optimizer] = [kinds[group["algorithm"]]([group]) for group in self.param_groups]
        for part in self._parts:
            part.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # also what `load_state_dict` ends with: groups and state are new objects
        self._link()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step of both and return what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part, group in zip(self._parts, self.param_groups, strict=True):
            divided = [one for one in group["params"] if isinstance(one, DTensor) and one.grad is not None]
            if group["algorithm"] == "muon" and divided:
                for matrix in divided:
                    self._step_on_part(matrix, group)
            else:
                part.step()
        return loss

    def _step_on_part(self, matrix: Tensor, group: dict[str, Any]) -> None:
        """Take Muon's step on a matrix of which this process holds a part: momentum too; U alone is gathered."""
        assert isinstance(matrix, DTensor)
        assert matrix.grad is not None
        state, mu = self.state[matrix], group["momentum"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix.grad, memory_format=torch.preserve_format)
        buffer = state["momentum_buffer"]
        buffer.lerp_(matrix.grad, 1 - mu)
        looked_at: Any = matrix.grad.lerp(buffer, mu) if group["nesterov"] else buffer
        # torch's Muon on a matrix of zeros, without momentum or decay, makes of U the step alone.
        change = torch.nn.Parameter(torch.zeros(matrix.shape, dtype=matrix.dtype, device=matrix.device))
        change.grad = looked_at.full_tensor()
        settings = {name: group[name] for name in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
        torch.optim.Muon([change], weight_decay=0.0, momentum=0.0, nesterov=False, **settings).step()
        part = distribute_tensor(change.detach(), matrix.device_mesh, matrix.placements, src_data_rank=None).to_local()
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        held = matrix.to_local()
        held.add_(part.to(held.device))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
