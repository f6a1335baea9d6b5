"""Which model a checkpoint is of, so that it is not restored into another."""

from typing import Any

from lit_qrl.errors import ConfigError

SHAPE = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
"""What tells one model from another in its config."""


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
