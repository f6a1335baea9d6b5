"""A parser's error, which may be fifty lines of attempts, as one paragraph."""

import re
from collections.abc import Callable, Iterable

from lit_qrl.errors import nearest

EXTRAS = {"bitsandbytes": "bnb", "transformer_engine": "te", "vllm": "vllm"}
"""Optional libraries and what installs them."""


def readable(
    message: str, classes: Callable[[str], Iterable[str]] = lambda key: (), options: Iterable[str] = ()
) -> str:
    r"""Return what is wrong, what was expected and given, and the nearest name that exists.

    A value that may be of several types is reported once per type; the attempt that came furthest is the true one.

    Args:
        message: the parser's message.
        classes: from a key to the names that a `class_path` may have there, for a suggestion.
        options: option strings of the command, for a suggestion.

    >>> message = 'Parser key "trainer.callbacks":\n  - Expected a dot import path string: AISS'
    >>> readable(message, lambda key: ["AIS", "TokenVeto"])
    "trainer.callbacks: there is no class 'AISS'. Did you mean 'AIS'?"
    """
    key = re.search(r'(?:Parser key|[Kk]ey) "([^"]+)"', message)
    where = f"{key[1]}: " if key else ""
    given = re.search(r"(?:Given|Got) value: (.*)", message)
    value = f" Given: {given[1].strip()}." if given else ""

    # An option of a class that may be chosen by name: `NestedArg` is the parser's word for it.
    nested = re.search(r"NestedArg\(key='([\w.]+)'", message)
    if key and nested and "is abstract" in message:
        return f"{where}the option {nested[1]!r} is of a class that is not chosen. Set {key[1]}.class_path first."
    if key and nested and re.search(r"there is no option .*See --help", message):
        example = " (such as peft.LoraConfig)" if "PeftConfig" in message else ""
        hint = f"If no class is chosen yet, set {key[1]}.class_path first{example}; else see --help for its options."
        return f"{where}there is no option {nested[1]!r}. {hint}"

    # A class's own parser has made its paragraph already; in a list or a union it stands among other attempts.
    inner = re.search(r"^[\s-]*((?:[\w.]+: )?(?:the value|there is no|the file) .*)$", message, re.MULTILINE)
    if key and inner:
        deeper = re.match(r"[\w.]+: ", inner[1])
        return f"{key[1]}{'.' if deeper else ': '}{inner[1]}"

    if found := re.search(r"(?:Option '([^']+)' is not accepted|Key '([^']+)' is not expected)", message):
        name = found[1] or found[2]
        missing = re.findall(r"(?:Subclass|class) '([\w.]+)'", message)
        close = nearest(name, [option.lstrip("-") for option in options])
        hint = close if close.startswith("Did") else "See --help for the options."
        return f"{where}there is no option {name!r}{f' of {missing[0]}' if missing else ''}. {hint}"
    if found := re.search(r"unrecognized arguments?: (--?[\w.+-]+)", message):
        return f"{found[1]} is not an option of this command. {nearest(found[1], options)}"
    if found := re.search(r"Expected a dot import path string: (\S.*)", message):
        name = re.sub(r".*class_path:\s*([\w.]+).*", r"\1", found[1].strip())
        known = list(classes(key[1] if key else ""))
        hint = nearest(name, known) if known else "Give it with its module, such as package.module.Class."
        return f"{where}there is no class {name!r}. {hint}"
    if found := re.search(r"(?:No module named|has no attribute|cannot import name) ?'?([\w.]+)'?", message):
        extra = EXTRAS.get(found[1].split(".")[0])
        remedy = f"Install it: pip install 'lit-qrl[{extra}]'." if extra else "Check the class path."
        return f"{where}{found[0].strip()}.{value} {remedy}"
    if found := re.search(r"File does not exist: '?([^'\n]+?)'?\.?$", message, re.MULTILINE):
        return f"{where}the file {found[1]!r} does not exist. Check the path."
    if found := re.search(r'(?:Key|Option) "?([\w.]+)"? is required[^.]*', message):
        return f"{found[1]} is required but was not given. Add it to a --config file or the command line."
    if found := re.search(r"arguments are required: (.*)", message):
        command, _, _ = found[1].partition(".")
        names = [name.removeprefix(f"{command}.") for name in found[1].split(", ")]
        them = "it" if len(names) == 1 else "them"
        return (
            f"{', '.join(names)}: required, but not given. Add {them} to a --config file or the command line, or start "
            f"from a whole one: lit-qrl {command} --config configs/quickstart.yaml."
        )
    if "is required" in message:
        return f"{where}{_first(message)} Add it to a --config file or the command line."
    if re.search(r"(?:not accessible|Problem parsing|Unable to (?:load|parse)|No such file)", message) and not given:
        return f"{where}{_first(message)}"
    if found := re.match(r"Unexpected config: (.*)", message):
        return f"A --config file holds no keys. Expected: YAML such as `data: {{group_size: 8}}`. Given: {found[1]}."
    expected = dict.fromkeys(re.findall(r"Expected (?:an? |value )?<class '(?:[\w.]*\.)?(\w+)'>", message))
    # A union may hold several lists, and of one list of numbers only the Subtypes say what they are.
    literals = [line for line in message.splitlines() if re.search(r"(?:Expected|Subtypes?).*?Literal\[", line)]
    if literals:
        listed = ",".join(re.findall(r"Literal\[([^\]]+)\]", literals[0]))
        choices = list(dict.fromkeys(choice.strip(" '\"") for choice in listed.split(",")))
        close = nearest(given[1].strip(), choices) if given else ""
        hint = f" {close}" if close.startswith("Did") else ""
        return f"{where}the value is not one of the choices. Expected: {', '.join(choices)}.{value}{hint}"
    if expected:
        kinds = " or ".join("null" if kind == "NoneType" else kind for kind in expected)
        return f"{where}the value has the wrong type. Expected: {kinds}.{value}"
    return f"{where}{_first(message)}{value}"


def _first(message: str) -> str:
    lines = [line.strip(" -:") for line in message.splitlines()]
    telling = [line for line in lines if line and not line.startswith(("Parser key", "Subtypes", "Errors"))]
    return (telling[0] if telling else message.strip()).rstrip(".") + "."
