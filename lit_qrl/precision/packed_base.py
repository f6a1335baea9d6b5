"""A folder whose linear layers are in a format of 4 or 8 bits, as the frozen base of a policy."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_module_tensor_to_device
from peft import PeftConfig
from torch import nn

from lit_qrl.errors import ConfigError
from lit_qrl.formats import MXFP4, NF4, NVFP4, FP8Block, FP8Row, FP8Tensor, Int4Group, Int8Channel
from lit_qrl.formats.base import NumberFormat, QuantizedWeight
from lit_qrl.network.adapters import starts_from_base
from lit_qrl.network.experts import ExpertStack, expert_stacks, stored_names
from lit_qrl.network.folder import FolderReader
from lit_qrl.network.structure import outline_of
from lit_qrl.precision.base import QuantizedPrecision
from lit_qrl.precision.deferred import DeferredWeights

# What tells a packed layer from a plain one among the names of its tensors.
_MARKS = (".weight_packed", ".weight_scale", ".weight.absmax")


def packed_format(quantization: Mapping[str, Any]) -> NumberFormat | None:
    """Return the format that a `quantization_config` describes, or None where no frozen base is held in it.

    Args:
        quantization: of a Hugging Face config.

    >>> packed_format(NVFP4().quantization_config())
    NVFP4(four_over_six=False)
    >>> packed_format(Int4Group(group_size=64).quantization_config())
    Int4Group(group_size=64, activations=None)
    >>> packed_format(FP8Row().quantization_config())
    FP8Row()
    """
    method = quantization.get("quant_method")
    if method == "bitsandbytes":
        plain_nf4 = quantization.get("bnb_4bit_quant_type") == "nf4" and quantization.get("load_in_4bit")
        return NF4() if plain_nf4 and not quantization.get("bnb_4bit_use_double_quant") else None
    groups = list((quantization.get("config_groups") or {}).values())
    if method != "compressed-tensors" or len(groups) != 1:
        return None
    weights, inputs = (groups[0].get(part) or {} for part in ("weights", "input_activations"))
    sizes = [weights["group_size"]] if weights.get("group_size") else []
    candidates: list[NumberFormat] = [NVFP4(), MXFP4()]
    candidates += [Int4Group(group_size=size) for size in sizes if size > 0 and size % 8 == 0]
    candidates += [FP8Row(), FP8Block(), FP8Tensor(), FP8Tensor("token"), Int8Channel()]
    for format in candidates:
        config = format.quantization_config()
        own = config["config_groups"]["group_0"]
        named = quantization.get("format", config["format"]) == config["format"]
        plain = weights.get("symmetric", True) and not weights.get("actorder")
        made = inputs.get("symmetric", True) and bool(inputs.get("dynamic")) == bool(inputs)
        alike = _alike(weights, own["weights"]) and _alike(inputs, own["input_activations"] or {})
        if named and plain and made and alike:
            return format
    return None


def _alike(given: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    keys = ("num_bits", "type", "strategy", "group_size", "block_structure")
    return all(given.get(key) == own.get(key) for key in keys)


def take_packed_format(config: Any, source: str, lora: PeftConfig | None, random_weights: bool) -> NumberFormat | None:
    """Return the format of a quantized folder, and take it out of the config: engines then see the plain model's.

    Args:
        config: the folder's, as transformers reads it.
        source: its name, for errors.
        lora: the adapter to come.
        random_weights: the folder's weights are not read.

    Raises:
        ConfigError: for codes that cannot be held here, or an adapter that starts from the base's weights.
    """
    quantization = _quantization(config)
    if quantization is None:
        return None
    found = packed_format(quantization)
    if random_weights:
        del config.quantization_config
        return None
    if found is None:
        if quantization.get("quant_method") != "compressed-tensors":
            return None  # transformers has loaders of its own
        raise ConfigError(
            f"{source} is quantized in a way that no adapter can be trained over here.",
            expected="the plain checkpoint, weights alone in nvfp4, mxfp4, int4_group or nf4, or one of fp8_row, "
            "fp8_block, fp8_tensor and int8_channel, whose activations are quantized on the fly",
            given=f"compressed-tensors {quantization.get('format')}",
            remedy="Make one with lit-qrl quantize.",
        )
    if starts_from_base(lora):
        raise ConfigError(
            "This adapter starts from the base's weights, of which a quantized folder holds only codes.",
            expected="peft.LoraConfig with init_lora_weights true, false or gaussian, and without DoRA",
            given=f"{source} in {found.name}",
            remedy="Start from the plain checkpoint, or change model.policy.lora.",
        )
    del config.quantization_config
    return found


def multiplied_out(config: Any) -> dict[str, Any]:
    """Return what `from_pretrained` needs to read a folder whose experts are in gpt-oss's own MXFP4 as plain weights.

    Without it transformers keeps their codes where a device and its `kernels` package can multiply them, and experts
    that no format, receipt or gradient sees.

    Args:
        config: the model's, as transformers reads it.
    """
    from transformers.utils.quantization_config import Mxfp4Config

    mxfp4 = (_quantization(config) or {}).get("quant_method") == "mxfp4"
    return {"quantization_config": Mxfp4Config(dequantize=True)} if mxfp4 else {}


def _quantization(config: Any) -> Mapping[str, Any] | None:
    """Return what a config says of how its folder is quantized, or None."""
    said = getattr(config, "quantization_config", None)
    return said if said is None or isinstance(said, Mapping) else said.to_dict()


class PackedBase:
    """The weights of a quantized folder: plain ones go into the model at once, codes when a layer asks for them.

    Args:
        folder: a Hugging Face folder.
        format: its format.

    Raises:
        ConfigError: for a shard that is missing or truncated.
    """

    def __init__(self, folder: Path, format: NumberFormat) -> None:
        self.folder, self.format = folder, format
        self.reader = FolderReader(folder)
        self._parts: dict[str, list[str]] = {}
        self._stacks: dict[str, ExpertStack] = {}

    def build(self, model: Callable[[], Any], dtype: torch.dtype | None) -> Any:
        """Return the model with every plain weight in place; packed layers have shape and dtype, and no memory.

        Args:
            model: makes it, on the current default device.
            dtype: of the plain weights; None leaves them as they are stored.

        Raises:
            ConfigError: when the folder's tensors are not those of the model.
        """
        network = DeferredWeights(model).network
        self.reader.rename(stored_names(network, self.reader.names))
        marked = ((name, mark) for name in self.reader.names for mark in _MARKS if name.endswith(mark))
        self._parts = {name.removesuffix(mark): [] for name, mark in marked}
        for name in self.reader.names:
            layer, found, _ = name.partition(".weight")
            if found and layer in self._parts:
                self._parts[layer].append(name)
        self._stacks = {name: one for name, one in expert_stacks(network).items() if self._holds_apart(one)}
        self._check(network)
        shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
        device = torch.get_default_device()
        for name in self.reader.names:
            if name not in shapes or name.removesuffix(".weight") in self._parts:
                continue
            tensor = self.reader.read([name])[name]
            wanted = dtype if tensor.is_floating_point() else None
            own = tensor.to(device=device, dtype=wanted, copy=True)
            set_module_tensor_to_device(network, name, device, value=own, dtype=own.dtype)
        for name, stack in self._stacks.items():
            for matrix in stack.parts if not stack.within(self._parts) else ():
                tensors = self.reader.read([f"{layer}.weight" for layer in stack.layers(matrix)])
                parts = {key.removesuffix(".weight"): tensor for key, tensor in tensors.items()}
                own = stack.joined(matrix, parts).to(device=device, dtype=dtype)
                set_module_tensor_to_device(network, f"{name}.{matrix}", device, value=own, dtype=own.dtype)
        network.tie_weights()
        return network

    def _holds_apart(self, stack: ExpertStack) -> bool:
        """Return whether the folder holds every expert of a layer by itself, as codes or plain."""
        return all(layer in self._parts or f"{layer}.weight" in self.reader.shapes for layer in stack.layers())

    def _check(self, network: Any) -> None:
        modules = dict(network.named_modules())
        experts = {name: shape for stack in self._stacks.values() for name, shape in stack.layers().items()}
        for layer in self._parts:
            linear: Any = modules.get(layer)
            if layer not in experts and not isinstance(linear, nn.Linear):
                raise self._foreign(network, f"it has no linear layer {layer}")
            shape = experts.get(layer) or (linear.out_features, linear.in_features)
            try:
                self.weight(layer, shape, "cpu")
            except (ValueError, RuntimeError, KeyError) as error:
                raise self._foreign(network, f"{layer} is {shape} there: {error}") from error
        tied = network.config.get_text_config().tie_word_embeddings
        skipped = set(getattr(network, "_tied_weights_keys", None) or ()) if tied else set()
        codes = {name for parts in self._parts.values() for name in parts} | {f"{layer}.weight" for layer in experts}
        for name in self.reader.names:  # old folders hold the rotary frequencies, which are computed today
            layer = name.rpartition(".")[0]
            if name in codes or name in network.state_dict() or layer in self._parts or name.endswith("inv_freq"):
                continue
            raise self._foreign(network, f"it holds {name}, which that architecture does not have")
        for name, tensor in network.state_dict().items():
            held = self.reader.shapes.get(name)
            if name.removesuffix(".weight") in self._parts or (held is None and name in skipped):
                continue
            if name.rpartition(".")[0] in self._stacks:
                continue
            if held != tuple(tensor.shape):
                given = "is missing" if held is None else f"has shape {held} instead of {tuple(tensor.shape)}"
                raise self._foreign(network, f"{name} {given}")

    def _foreign(self, network: Any, why: str) -> ConfigError:
        return ConfigError(
            f"The quantized folder {self.folder} is not one of {type(network).__name__}, which its config names: "
            f"{why}.",
            expected="the tensors of that architecture",
            remedy="Take config and weights of one model, or quantize it again.",
        )

    def weight(self, layer: str, shape: tuple[int, int], device: Any) -> QuantizedWeight:
        """Return the codes and scales of a layer as the folder holds them."""
        tensors = self.reader.read(self._parts[layer])
        suffixes = {name.removeprefix(f"{layer}."): tensor.to(device, copy=True) for name, tensor in tensors.items()}
        return self.format.load(suffixes, shape)

    def select(
        self, format: NumberFormat, exclude: Collection[str], candidates: Collection[str], plugin: str
    ) -> list[str]:
        """Return the layers that a plugin packs: those that the folder holds as codes.

        Args:
            format: the plugin's.
            exclude: the plugin's globs.
            candidates: what is left of the model's linear layers after them.
            plugin: its name.

        Raises:
            ConfigError: for another format, or a layer that the plugin leaves out.
        """
        check_codes(self.folder, self.format, format, plugin)
        self.format = format  # which says what becomes of inputs
        left_out = sorted(set(self._parts) - set(candidates))
        if left_out:
            raise ConfigError(
                f"{plugin} leaves out {left_out[0]}, of which {self.folder} holds only codes.",
                expected="no layer in `exclude` that the folder holds packed",
                given=", ".join(exclude) or "no exclude",
                remedy="Leave `exclude` out, or quantize the folder again with the same --exclude.",
            )
        return list(self._parts)


def check_codes(folder: str | Path, held: NumberFormat, format: NumberFormat, plugin: str) -> None:
    """Raise `ConfigError` where a plugin computes in another format than a folder holds.

    How inputs are scaled while the model runs is no matter of the codes.

    Args:
        folder: quantized.
        held: its format.
        format: the plugin's.
        plugin: its name.
    """
    if format == held or (isinstance(held, FP8Tensor) and isinstance(format, FP8Tensor)):
        return
    raise ConfigError(
        f"{folder} holds its weights in {held}.",
        expected=f"the same format in {plugin}: {held}",
        given=format,
        remedy="Set the plugin's format to the folder's, or start from the plain checkpoint.",
    )


def check_plugin(plugin: Any, policy: Any, device: torch.device) -> None:
    """Raise `ConfigError` for a policy that a run's precision plugin cannot train, before weights are loaded.

    Args:
        plugin: of the Trainer, ours or Lightning's.
        policy: with the format of its folder, if that is quantized.
        device: of the learner.
    """
    ours = plugin if isinstance(plugin, QuantizedPrecision) else None
    if policy.packed_format is not None and not (ours is not None and ours.packs_base):
        format: NumberFormat = policy.packed_format
        packs = "PackedLoRA" if format.quantizes_activations else "NVFP4LoRA"  # as configs/precision has them
        raise ConfigError(
            f"The model folder {policy.source} holds {format.name} codes, which only an adapter can be trained over.",
            expected=f"trainer.plugins with {packs}(format={format.name}), and model.policy.lora",
            given=ours and type(ours).__name__,
            remedy=f"Add configs/precision/{format.name}_lora.yaml, or start from the plain checkpoint.",
        )
    if ours is not None:
        ours.check_policy(policy)
        if policy.packed_format is None:  # whose layers a folder holds
            ours.check_model(outline_of(policy), device)
