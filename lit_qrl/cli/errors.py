"""Errors of others as one paragraph: the parser's, the Trainer's, and a publish that did not arrive as sent.

`lit-qrl COMMAND --help` reads this file too, so what loads torch or Lightning is imported inside functions.
"""

import errno
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_qrl.errors import FULL, ConfigError, IncompleteError, nearest, not_written
from lit_qrl.run.folder import last_checkpoint
from lit_qrl.shipped import shipped

if TYPE_CHECKING:
    from lit_qrl.receipts.ledger import PublishError


EXTRAS = {"bitsandbytes": "bnb", "transformer_engine": "te", "vllm": "vllm"}
"""Optional libraries and what installs them."""
HARDWARE = ("accelerator", "devices", "strategy")
"""Settings that are shown when Lightning names none."""
SEE_HELP = (
    "See --help for the options; docs/from_trl.md and docs/from_verl.md say what those of TRL and verl are called here."
)
SAID = (
    (
        r"Multiple subclasses with name (\w+)\.[^:\n]*: (.*?)\.?$",
        "{where}there are several classes {0!r}. Give one with its module: {1}.",
    ),
    (
        r"unrecognized arguments?: ([^\s-]\S*\.ya?ml)",
        "A configuration file comes after --config. Given: {0}. Write --config {0}.",
    ),
    (r"File does not exist: '?([^'\n]+?)'?\.?$", "{where}the file {0!r} does not exist. Check the path."),
    (
        r'(?:Key|Option) "?([\w.]+)"? is required',
        "{0} is required but was not given. Add it to a --config file or the command line.",
    ),
    (
        r"^Unexpected config: (.*)",
        "A --config file holds no keys. Expected: YAML such as `data: {{group_size: 8}}`. Given: {0}.",
    ),
)
"""What the parser says, and the sentence instead of it."""
TOLD = r"the value |there is no |there are several |the file |required, but not given"
"""How such a sentence begins behind its key."""
OPTIONS_SHOWN = 30
"""Options of a command up to which all are written out."""
SHOWN = 4
"""Faults that are written out."""
PROBE_REMEDY = (
    "Where learner and sampler may differ that much, set publisher.probe_every to 0; else choose another "
    "publisher.format or another engine."
)
ENGINE_REMEDY = (
    "If it happens once in a while, let publisher.on_fault: retry publish again; if it comes back, the engine does not "
    "hold what it is sent, and another one, or another version of it, has to be taken."
)
BUFFER_REMEDY = (
    "Start it again with --ckpt_path last, which builds the engine anew; if it comes back, look for code that writes "
    "into the engine's model, or test the memory."
)
REFUSED_REMEDY = "What is sent are the policy's weights as the callbacks' on_publish leave them: check those."


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
    if key and nested and re.search(r"is abstract|there is no option .*See --help", message):
        example = " (such as peft.LoraConfig)" if "PeftConfig" in message else ""
        hint = f"If no class is chosen yet, set {key[1]}.class_path first{example}; else see --help for its options."
        return f"{where}there is no option {nested[1]!r}. {hint}"

    # A class's own parser has made its paragraph already; in a list or a union it stands among other attempts.
    inner = re.search(rf"^[\s-]*((?:[\w., ]+: )?(?:{TOLD}).*)$", message, re.MULTILINE)
    if key and inner:
        of_option = re.match(r"[\w., ]+: ", inner[1])
        return f"{key[1]}{'.' if of_option else ': '}{inner[1]}"
    for pattern, sentence in SAID:
        if found := re.search(pattern, message, re.MULTILINE):
            return sentence.format(*found.groups(), where=where)

    refused = r"Option '([^']+)' is not accepted|Key '([^']+)' is not expected|does not accept option '([^']+)'"
    if found := re.search(refused, message):
        name = found[1] or found[2] or found[3]
        missing = re.findall(r"(?:Subclass|class) '([\w.]+)'", message)
        hint = _instead(name, [option.lstrip("-") for option in options])
        return f"{where}there is no option {name!r}{f' of {missing[0]}' if missing else ''}. {hint}"
    if found := re.search(r"unrecognized arguments?: (--?[\w.+-]+)", message):
        return f"{found[1]} is not an option of this command. {_instead(found[1], options)}"
    # A number that a class of torch may stand for too, as a learning rate: who gives a plain word means neither.
    number = re.search(r"Subtypes: \[.*<class '(?:int|float)'>", message)
    if not number and (found := re.search(r"Expected a dot import path string: (\S.*)", message)):
        name = re.sub(r".*class_path:\s*([\w.]+).*", r"\1", found[1].strip())
        known = list(classes(key[1] if key else ""))
        hint = nearest(name, known) if known else "Give it with its module, such as package.module.Class."
        return f"{where}there is no class {name!r}. {hint}"
    if found := re.search(r"(?:No module named|has no attribute|cannot import name) ?'?([\w.]+)'?", message):
        extra = EXTRAS.get(found[1].split(".")[0])
        looked = "Check the name; modules are found in the working directory and on PYTHONPATH, not beside the YAML."
        remedy = f"Install it: pip install 'lit-qrl[{extra}]'." if extra else looked
        return f"{where}{found[0].strip()}.{value} {remedy}"
    if found := re.search(r"arguments are required: (.*)", message):
        names = re.sub(r"\b(fit|validate|test|predict)\.", "", found[1])
        return f"{names}: required, but not given. Add it to a --config file, in a class to its init_args."
    # A union may hold several lists, and of one list of numbers only the Subtypes say what they are.
    literals = [line for line in message.splitlines() if re.search(r"(?:Expected|Subtypes?).*?Literal\[", line)]
    if literals:
        listed = ",".join(re.findall(r"Literal\[([^\]]+)\]", literals[0]))
        choices = list(dict.fromkeys(choice.strip(" '\"") for choice in listed.split(",")))
        close = nearest(given[1].strip(), choices) if given else ""
        hint = f" {close}" if close.startswith("Did") else ""
        expected = ", ".join([*_kinds(literals[0], r"<class '(?:[\w.]*\.)?(\w+)'>"), *choices])
        return f"{where}the value is not one of the choices. Expected: {expected}.{value}{hint}"
    if kinds := _kinds(message, r"Expected (?:an? |value )?<class '(?:[\w.]*\.)?(\w+)'>"):
        return f"{where}the value has the wrong type. Expected: {' or '.join(kinds)}.{value}"
    lines = [line.strip(" -:") for line in message.splitlines()]
    telling = [line for line in lines if line and not line.startswith(("Parser key", "Subtypes", "Errors"))]
    return f"{where}{(telling or [message.strip()])[0].rstrip('.')}.{value}"


def _kinds(text: str, pattern: str) -> list[str]:
    """Return the types that a message names, in the words of YAML."""
    words = {"bool": "true or false", "NoneType": "null"}
    kinds: list[str] = re.findall(pattern, text)
    return [words.get(kind, kind) for kind in dict.fromkeys(kinds)]


def _instead(name: str, options: Iterable[str]) -> str:
    """Return the nearest option that there is, or where all are listed."""
    options = list(options)
    close = nearest(name, options)
    told = close.startswith("Did") or (name.startswith("-") and len(options) <= OPTIONS_SHOWN)
    return close if told else SEE_HELP


def refused(error: Exception, settings: Mapping[str, Any]) -> ConfigError:
    """Return the paragraph for what the Trainer's constructor raised.

    Args:
        error: Lightning's own.
        settings: the Trainer's arguments by name.

    >>> print(refused(ValueError("You selected an invalid accelerator name: `accelerator='gpuu'`."),
    ...     {"accelerator": "gpuu", "devices": "auto"}))
    Lightning cannot build the Trainer: You selected an invalid accelerator name: `accelerator='gpuu'`. Given: \
trainer.accelerator: gpuu. Correct trainer.accelerator.
    """
    from lit_qrl import strategies

    text = re.sub(r"<(?:\w+\.)*(\w+) object at 0x\w+>", r"\1", " ".join(str(error).split())).rstrip(".!")
    keys = [key for key, value in settings.items() if value is not None and re.search(rf"\b{key}\b", text)]
    keys = keys or [key for key in HARDWARE if settings.get(key, "auto") != "auto"]
    given = ", ".join(f"trainer.{key}: {_shown(settings[key])}" for key in keys)
    remedy = f"Correct {' or '.join(f'trainer.{key}' for key in keys)}." if keys else "See lit-qrl fit --help."
    if (name := str(settings.get("strategy"))) in strategies.__all__:
        remedy = f"{name} is a class: set trainer.strategy.class_path to it, as {shipped('configs/strategy')} does."
    return ConfigError(f"Lightning cannot build the Trainer: {text}.", given=given or None, remedy=remedy)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value) if isinstance(value, (str, int, float, tuple)) else type(value).__name__


def made_by_training(error: ConfigError, steps: int) -> bool:
    """Return True when weights were refused that `steps` optimizer steps, and not the checkpoint, made NaN or inf.

    >>> from lit_qrl.formats.numerics import NONFINITE_REMEDY
    >>> made_by_training(ConfigError("A weight holds NaN.", remedy=NONFINITE_REMEDY), steps=0)
    False
    """
    from lit_qrl.formats.numerics import NONFINITE_REMEDY

    return error.remedy == NONFINITE_REMEDY and steps > 0


def paragraph(error: "PublishError | ConfigError | IncompleteError", run_folder: str | Path) -> str:
    """Return what is wrong with a publish, where the run left its event log and its report, and what to do.

    Args:
        error: which ended the run; a `ConfigError` is of weights that are not finite.
        run_folder: of the run.

    >>> from lit_qrl.receipts.ledger import RefusedError
    >>> print(paragraph(RefusedError("The publish is incomplete: 1 of 9 tensors are missing.", 3), "runs/a/1"))
    ... # doctest: +ELLIPSIS
    The run was stopped by a publish that was refused. The publish is incomplete: 1 of 9 tensors are missing. ...
    """
    from lit_qrl.formats.numerics import NONFINITE_REMEDY
    from lit_qrl.receipts.ledger import RefusedError

    if isinstance(error, ConfigError):
        return f"The run was stopped. {error} {_where(run_folder, not_finite=True)}"
    if isinstance(error, (RefusedError, IncompleteError)):
        return f"The run was stopped by a publish that was refused. {error} {REFUSED_REMEDY} {_where(run_folder)}"
    which = f"publish {error.version}" if error.version >= 0 else "the publish before the first iteration"
    faults, kinds = [str(fault) for fault in error.faults], {fault.kind for fault in error.faults}
    more = f" (and {len(faults) - SHOWN} more)" if len(faults) > SHOWN else ""
    # of faults that are all of one kind
    remedies = {"non_finite": NONFINITE_REMEDY, "probe": PROBE_REMEDY, "buffer": BUFFER_REMEDY}
    remedy = remedies.get(min(kinds), ENGINE_REMEDY) if len(kinds) == 1 else ENGINE_REMEDY
    where = _where(run_folder, not_finite=kinds == {"non_finite"})
    return f"The run was stopped: {which} did not arrive as sent. {' '.join(faults[:SHOWN])}{more} {remedy} {where}"


def exited(error: SystemExit, run_folder: Path | None) -> str:
    """Return where code of the user has asked the process to end, and where that leaves the run, as a paragraph.

    Args:
        error: which ended the run.
        run_folder: of the run; None before it has one.
    """
    library = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parents[1])
    own = [one for one in frames if not one.filename.startswith((*library, ours, "<frozen"))]
    at = f" at {own[-1].filename}:{own[-1].lineno} (in {own[-1].name})" if own else ""
    where = "" if run_folder is None or not run_folder.is_dir() else f" {_where(run_folder)}"
    return (
        f"The run was ended by SystemExit({error.code!r}){at}: code that a run calls must not end its process. Raise "
        f"another exception there.{where}"
    )


def of_disk(error: OSError, run_folder: Path | None) -> str | None:
    """Return the paragraph for a file of a run that could not be written; None for an error of anything else.

    Args:
        error: of the system.
        run_folder: of the run; None before it has one.
    """
    named = Path(error.filename).absolute() if isinstance(error.filename, str) else None
    own = run_folder is not None and named is not None and named.is_relative_to(run_folder.absolute())
    if error.errno not in FULL and not (own and error.errno in (errno.EACCES, errno.EROFS, errno.EIO, errno.ESTALE)):
        return None
    told = not_written(error.filename or f"A file of {run_folder or Path.cwd()}", error)
    if run_folder is None or not last_checkpoint(run_folder):
        return f"The run was stopped. {told} No checkpoint had been written."
    return f"The run was stopped. {told} {_where(run_folder)} Go on with --ckpt_path last."


def _where(run_folder: str | Path, not_finite: bool = False) -> str:
    report, saved = Path(run_folder) / "report" / "index.html", last_checkpoint(run_folder)
    known = f"The report is {report}." if report.is_file() else f"The run folder is {run_folder}."
    doubt = ", and may hold these weights already" if not_finite else ""
    return f"{known} The last checkpoint is {saved}{doubt}." if saved else f"{known} No checkpoint had been written."
