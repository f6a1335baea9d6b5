"""`lit-qrl export`: the policy of a run becomes a Hugging Face folder: plain, quantized, or its adapter."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lit_qrl.errors import ConfigError, nearest
from lit_qrl.run.folder import meant

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Names of dtypes in a configuration."""


def export(
    run: Path,
    *,
    output: Path,
    checkpoint: str = "last",
    adapter: bool = False,
    format: str | None = None,
    group_size: int | None = None,
    exclude: Sequence[str] = (),
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto",
    shard_gib: float = 4.0,
) -> Path:
    """Write the policy of a run as a Hugging Face folder. The folder appears only when complete.

    Examples:
      lit-qrl export runs/quickstart/1 --output exported/quickstart
      lit-qrl export runs/gsm8k/3 --output exported/gsm8k-fp8 --format fp8_row
      lit-qrl export runs/qerl/1 --output exported/qerl-adapter --adapter

    A LoRA is merged into its base, except with --adapter, which writes a PEFT folder. A packed base (PackedLoRA) is
    dequantized first; --format with its format packs the sum again, which rounds it. vLLM and transformers load
    every output; PEFT loads an adapter over the plain base, vLLM over that or the quantized folder.

    Args:
        run: a run folder, such as runs/quickstart/1, or a .ckpt in it.
        output: folder to make; new or empty.
        checkpoint: name in RUN/checkpoints.
        adapter: write the LoRA alone, as a PEFT folder.
        format: number format of the linear layers (default: as trained, which under QATAligned and UnifiedFP8 is the
            plugin's).
        group_size: inputs per scale of int4_group (default: 128).
        exclude: linear layers that stay as they are: names, in which * stands for any part.
        dtype: of everything else; fp32 takes the master weights of a run that trained 16 bits, bit for bit.
        shard_gib: largest file written, in GiB.

    Returns:
        the folder, which is also printed.

    Raises:
        ConfigError: for whatever keeps the folder from being made.
    """
    if adapter and (format or dtype != "auto"):
        raise ConfigError(
            "An adapter is exported as it was trained.", remedy="Leave --format and --dtype out, or --adapter."
        )
    if shard_gib <= 0:
        raise ConfigError("--shard_gib is too small.", expected="a positive number", given=shard_gib)
    config_path, checkpoint_path = locate(run, checkpoint)

    import torch

    from lit_qrl import formats
    from lit_qrl.network.folder import appearing, own_dtype, refuse_existing, write_adapter, write_plain
    from lit_qrl.policy import DTYPES
    from lit_qrl.quantize import quantize_checkpoint

    options = {} if group_size is None else {"group_size": group_size}
    chosen = formats.get(format, **options) if format else None
    plain = DTYPES.get(dtype)
    if isinstance(chosen, formats.Dense):
        chosen, plain = None, chosen.dtype
    plugin = None if adapter else trained_in(config_path)
    packed = plugin if plugin is not None and plugin.packs_base else None
    if format is None and packed is not None:
        print(f"Merged into the base, dequantized from {packed.format}. --adapter writes the LoRA alone.")
    elif format is None and plugin is not None:
        chosen, exclude = plugin.format, exclude or plugin.exclude
        print(f"In {chosen}, as the learner computed. --format bf16 or fp32 writes its master weights.")
    elif packed is not None:
        exclude = exclude or packed.exclude
    refuse_existing(output)
    policy = restore(config_path, checkpoint_path, adapter_only=adapter, masters=plain == torch.float32, packed=packed)
    if packed is not None and chosen is None:  # what is multiplied out is in no dtype yet
        plain = plain or own_dtype(policy)
    shard_bytes = int(shard_gib * 2**30)
    if adapter:
        with appearing(output) as folder:
            write_adapter(policy, folder)
    elif chosen is None:
        with appearing(output) as folder:
            write_plain(policy, folder, plain, shard_bytes)
    else:
        output.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=output.absolute().parent) as place:
            write_plain(policy, Path(place), plain, shard_bytes)
            quantize_checkpoint(Path(place), output, chosen, exclude=exclude, dtype=plain, shard_bytes=shard_bytes)
    print(output)
    return output


def trained_in(config_path: Path) -> Any:
    """Return the precision plugin of a run that trained in a number format, or over a base in one; else None.

    Args:
        config_path: `config.yaml` of the run.
    """
    import yaml
    from jsonargparse import ArgumentParser

    from lit_qrl.precision.base import QuantizedPrecision

    try:
        plugins = yaml.safe_load(config_path.read_text())["trainer"].get("plugins") or []
    except (yaml.YAMLError, KeyError, TypeError, AttributeError):
        return None
    for entry in plugins if isinstance(plugins, list) else [plugins]:
        path = entry.get("class_path", "") if isinstance(entry, dict) else str(entry)
        if not path.startswith("lit_qrl.precision"):
            continue
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument("--plugin", type=QuantizedPrecision)
        return parser.instantiate(parser.parse_object({"plugin": entry})).plugin
    return None


def locate(run: Path, name: str) -> tuple[Path, Path]:
    """Return the configuration and the checkpoint of a run.

    Args:
        run: its folder, or a checkpoint in `checkpoints/`.
        name: of the checkpoint, with or without `.ckpt`.

    Raises:
        ConfigError: when either is missing; names what is there.
    """
    if run.suffix == ".ckpt":
        run, name = run.absolute().parent.parent, run.name
    config, folder = run / "config.yaml", run / "checkpoints"
    if not config.is_file():
        raise ConfigError(
            "This is not a run folder.",
            expected="a folder with config.yaml",
            given=run,
            remedy=meant(run),
        )
    checkpoint = folder / f"{name.removesuffix('.ckpt')}.ckpt"
    if not checkpoint.is_file():
        present = sorted(path.stem for path in folder.glob("*.ckpt"))
        raise ConfigError(
            f"The run {run} has no checkpoint {name!r}.",
            expected=", ".join(present) or "one that the run has saved",
            given=name,
            remedy=nearest(name, present) if present else "Wait for the end of its first iteration.",
        )
    return config, checkpoint


def restore(
    config_path: Path, checkpoint_path: Path, adapter_only: bool = False, masters: bool = False, packed: Any = None
) -> Any:
    """Return the policy of a checkpoint on the CPU; its source gives config, tokenizer and a frozen base.

    Args:
        config_path: `config.yaml` of the run.
        checkpoint_path: what the run saved.
        adapter_only: the base may be missing.
        masters: take the fp32 weights that the optimizer keeps the further bits of.
        packed: the run's `PackedLoRA`, which packs the base again as it was; None without one.

    Raises:
        ConfigError: for a file that is not what it should be, or weights that the checkpoint does not hold.
    """
    import torch

    from lit_qrl.network.names import is_saved_with_adapter
    from lit_qrl.optim.masters import saved_masters
    from lit_qrl.run.checkpoint_files import check_frozen, check_identity, put_together, read_checkpoint

    checkpoint = read_checkpoint(checkpoint_path)
    put_together(checkpoint, checkpoint_path, optimizers=False)
    policy = _policy(config_path)
    check_identity(checkpoint, policy)
    if adapter_only and policy.lora is None:
        raise ConfigError("The run trained all weights: it has no adapter.", remedy="Leave --adapter out.")
    with torch.device("meta"):
        policy.configure()
    tensors = {**checkpoint["state_dict"], **(saved_masters(checkpoint) if masters else {})}
    held = {k.removeprefix("policy."): v for k, v in tensors.items() if k.startswith("policy.")}
    missing, _ = policy.load_state_dict(held, strict=False, assign=True)
    frozen: dict[str, Any] = checkpoint["policy"].get("frozen") or {"names": []}
    elsewhere = {name.removeprefix("policy.") for name in frozen["names"]}
    based = [name for name in missing if name in elsewhere]
    missing = [name for name in missing if name not in elsewhere]
    again = packed is not None and frozen["names"]
    if adapter_only or again:
        missing = [name for name in missing if is_saved_with_adapter(name)]
    if missing:
        raise ConfigError(
            f"The checkpoint lacks {len(missing)} weights of the policy.",
            expected=missing[0],
            given=checkpoint_path,
            remedy="Over a packed base that was drawn at random export the adapter alone: add --adapter."
            if packed is not None
            else "Take the checkpoint of a finished iteration.",
        )
    if based and not adapter_only:
        policy = _policy(config_path, dtype=frozen["dtype"])
        if packed is None:
            policy.configure()
        else:
            with packed.module_init_context():
                policy.configure()
            packed.configure_policy(policy)
            packed.check_base(policy, checkpoint)
        check_frozen(checkpoint, {f"policy.{name}": tensor for name, tensor in policy.state_dict().items()})
        if masters:
            policy.float()
        policy.load_state_dict(held, strict=False, assign=True)
    policy.network.tie_weights()
    return policy


def _policy(config_path: Path, dtype: str | None = None) -> Any:
    """Return the policy that a run was configured with: without weights, or with its base's in `dtype`."""
    import yaml
    from jsonargparse import ArgumentParser

    from lit_qrl.network.adapters import drop_loftq
    from lit_qrl.policy import CausalPolicy

    try:
        entry = yaml.safe_load(config_path.read_text())["model"]["policy"]
        # without a frozen base the weights come from the checkpoint, so that the source need not have any
        changes = {"random_weights": True, "dtype": "auto"} if dtype is None else {"dtype": SHORT[dtype]}
        entry["init_args"] = {**entry.get("init_args", {}), "fuse": False, **changes}  # nothing is computed
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{config_path} is no configuration of a run.", expected="model.policy with a class_path", given=error
        ) from error
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--policy", type=CausalPolicy)
    parsed = parser.parse_object({"policy": entry})
    drop_loftq(parsed.policy)
    return parser.instantiate(parsed).policy
