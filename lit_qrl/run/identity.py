"""Which model a checkpoint is of, so that it is not restored into another."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from lit_qrl.errors import ConfigError

SHAPE = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
"""What tells one model from another in its config."""
SAMPLED = 64
"""Numbers of each tensor that tell one base from another, spread over it."""


def identity(policy: Any) -> dict[str, Any]:
    """Return what a checkpoint says about the policy it is of: the model's shape and its adapter's.

    Args:
        policy: with the model's `config`, and `lora`, a PEFT config or None.
    """
    config = policy.config.get_text_config()
    shape = {name: getattr(config, name, None) for name in SHAPE}
    lora = policy.lora
    adapter = {"adapter": None if lora is None else str(lora.peft_type.value), "rank": getattr(lora, "r", None)}
    return {**shape, **adapter}


def check_identity(checkpoint: dict[str, Any], policy: Any) -> None:
    """Raise `ConfigError` when a checkpoint is of another model, or of no policy at all.

    Args:
        checkpoint: as `torch.load` returns it; no tensor is read.
        policy: that is to be restored.
    """
    saved, own = checkpoint.get("policy"), identity(policy)
    if not isinstance(saved, dict):
        raise ConfigError(
            "The checkpoint holds no policy.", expected="one that a run of lit-qrl saved", remedy="Check --ckpt_path."
        )
    differing = [name for name in own if saved.get(name) != own[name]]
    if differing:
        raise ConfigError(
            "The checkpoint is of another model.",
            expected=", ".join(f"{name} {own[name]}" for name in differing),
            given=", ".join(f"{name} {saved.get(name)}" for name in differing),
            remedy="Set model.policy to what the checkpoint was trained from, or start without --ckpt_path.",
        )


def describe_frozen(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what a checkpoint says about the frozen weights that it leaves out: names, dtype and a fingerprint.

    The fingerprint is a short digest of names, shapes and some numbers of each tensor: equal for equal tensors.

    >>> one, other = (describe_frozen({"w": torch.full((3,), value)}) for value in (1.0, 2.0))
    >>> one["names"], one["dtype"], one["fingerprint"] == other["fingerprint"]
    (['w'], 'float32', False)
    """
    digest, samples = blake2b(digest_size=8), []
    for name, tensor in tensors.items():
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        # What processes share (a DTensor) is made whole, one at a time.
        flat = getattr(tensor.detach(), "full_tensor", tensor.detach)().flatten()
        if flat.is_floating_point():
            samples.append(flat[:: max(flat.numel() // SAMPLED, 1)][:SAMPLED].float())
    if samples:  # one transfer
        digest.update(torch.cat([sample.to(samples[0].device) for sample in samples]).cpu().numpy().tobytes())
    dtype = next((str(one.dtype).removeprefix("torch.") for one in tensors.values() if one.is_floating_point()), None)
    return {"names": list(tensors), "dtype": dtype, "fingerprint": digest.hexdigest()}


def check_frozen(checkpoint: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise `ConfigError` when the frozen weights that a checkpoint leaves out are not the ones loaded here.

    Args:
        checkpoint: as `torch.load` returns it.
        tensors: the policy's weights, by the checkpoint's names; others than the frozen ones do not matter.
    """
    saved = checkpoint["policy"].get("frozen")
    if saved is None:
        return
    own = describe_frozen({name: tensors[name] for name in saved["names"] if name in tensors})
    if own["fingerprint"] != saved["fingerprint"]:
        raise ConfigError(
            "The checkpoint's adapter was trained over another base.",
            expected=f"frozen weights with fingerprint {saved['fingerprint']}",
            given=own["fingerprint"],
            remedy="Set model.policy to the model and the dtype that the run started from.",
        )
