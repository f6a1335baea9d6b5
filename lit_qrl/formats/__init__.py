"""Number formats: one class each, found by name with `get`."""

from dataclasses import fields, is_dataclass
from typing import Any

from lit_qrl.errors import ConfigError, nearest
from lit_qrl.formats.base import NumberFormat, PreparedWeight, QuantizedWeight
from lit_qrl.formats.dense import BF16, FP16, FP32, Dense, MultipliedOut
from lit_qrl.formats.fp8_block import FP8Block
from lit_qrl.formats.fp8_row import FP8Row
from lit_qrl.formats.fp8_tensor import FP8Tensor
from lit_qrl.formats.int3_channel import Int3Channel
from lit_qrl.formats.int4_group import Int4Group
from lit_qrl.formats.int8_channel import Int8Channel
from lit_qrl.formats.mxfp4 import MXFP4
from lit_qrl.formats.mxfp8 import MXFP8
from lit_qrl.formats.nf4 import NF4
from lit_qrl.formats.nvfp4 import NVFP4
from lit_qrl.formats.support import TABLE, FormatSupport

__all__ = [
    "BF16",
    "FP16",
    "FP32",
    "MXFP4",
    "MXFP8",
    "NF4",
    "NVFP4",
    "Dense",
    "FP8Block",
    "FP8Row",
    "FP8Tensor",
    "FormatSupport",
    "Int3Channel",
    "Int4Group",
    "Int8Channel",
    "MultipliedOut",
    "NumberFormat",
    "PreparedWeight",
    "QuantizedWeight",
    "get",
    "names",
    "register",
]

_FORMATS: dict[str, type[NumberFormat]] = {
    format.name: format
    for format in (
        BF16,
        FP16,
        FP32,
        FP8Tensor,
        FP8Row,
        FP8Block,
        Int8Channel,
        Int4Group,
        NVFP4,
        MXFP4,
        MXFP8,
        NF4,
        Int3Channel,
    )
}


def register(format: type[NumberFormat], support: FormatSupport | None = None) -> None:
    """Make a number format known by its name, wherever one is named, and put its row into the table.

    Args:
        format: a subclass of `NumberFormat`, a frozen dataclass with a `name`.
        support: what the rooms above can do with it; None is what most formats have: the embedded engine, `audit`,
            `quantize` and `export`.

    Raises:
        ConfigError: for a name that another class has.
    """
    if _FORMATS.get(format.name, format) is not format:
        raise ConfigError(
            "A number format of this name is there already.",
            expected="a new name",
            given=f"{format.name}, of {_FORMATS[format.name].__name__} and {format.__name__}",
        )
    _FORMATS[format.name] = format
    TABLE[format.name] = support or TABLE.get(format.name, FormatSupport())


def names() -> list[str]:
    """Return the names that `get` knows."""
    return list(_FORMATS)


def get(format: "NumberFormat | str", **options: Any) -> NumberFormat:
    """Return the number format of that name, or the format itself.

    Args:
        format: a name out of `names()`, options behind a colon where there are any, or a format.
        **options: the format's own arguments, such as `group_size`.

    Raises:
        ConfigError: for an unknown name, an unknown option, or options beside a format.

    >>> get("int4_group", group_size=64).bits_per_weight
    4.25
    >>> get("int4_group:group_size=32,activations=fp8"), get("nvfp4:four_over_six")
    (Int4Group(group_size=32, activations='fp8'), NVFP4(four_over_six=True))
    """
    if isinstance(format, NumberFormat):
        if options:
            raise ConfigError(
                f"The format {format.name} is already built.",
                expected="options beside a name",
                given=", ".join(options),
                remedy="Give them to its class.",
            )
        return format
    format, _, given = format.partition(":")
    options |= {name: _value(text) for name, _, text in (one.partition("=") for one in given.split(",") if one)}
    if format not in _FORMATS:
        raise ConfigError("There is no such number format.", given=format, remedy=nearest(str(format), _FORMATS))
    cls = _FORMATS[format]
    known = {field.name: field.default for field in fields(cls)} if is_dataclass(cls) else {}
    for option, value in options.items():
        if option not in known:
            remedy = nearest(option, list(known)) if known else "Leave it out."
            raise ConfigError(
                f"The format {format} has no option {option!r}.",
                expected=", ".join(known) or "no options",
                given=option,
                remedy=remedy,
            )
        if isinstance(known[option], int) and type(value) is not type(known[option]):
            expected = "true or false" if isinstance(known[option], bool) else "a whole number"
            raise ConfigError(f"The {option} of {format} does not fit.", expected=expected, given=value)
    return cls(**options)


def _value(text: str) -> Any:
    """Return the value of an option as it was typed; one without a value is switched on."""
    words = {"": True, "true": True, "false": False, "null": None}
    return words[text] if text in words else int(text) if text.isdecimal() else text
