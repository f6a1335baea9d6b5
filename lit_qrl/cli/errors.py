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
WATCHES = {
    "EarlyStopping": r"Early stopping conditioned on metric `([^`]+)`",
    "ModelCheckpoint": r"`ModelCheckpoint\(monitor='([^']+)'\)` could not find the monitored key",
}
"""What says that a metric is missing, and how Lightning begins to say so."""
SEE_HELP = "See --help for the options."
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
    if key and nested and "is abstract" in message:
        return f"{where}the option {nested[1]!r} is of a class that is not chosen. Set {key[1]}.class_path first."
    if key and nested and re.search(r"there is no option .*See --help", message):
        example = " (such as peft.LoraConfig)" if "PeftConfig" in message else ""
        hint = f"If no class is chosen yet, set {key[1]}.class_path first{example}; else see --help for its options."
        return f"{where}there is no option {nested[1]!r}. {hint}"

    if found := re.search(r"Multiple subclasses with name (\w+)\.[^:\n]*: (.*?)\.?$", message, re.MULTILINE):
        return f"{where}there are several classes {found[1]!r}. Give one with its module: {found[2]}."

    # A class's own parser has made its paragraph already; in a list or a union it stands among other attempts.
    told = r"the value |there is no |the file |required, but not given"
    inner = re.search(rf"^[\s-]*((?:[\w., ]+: )?(?:{told}).*)$", message, re.MULTILINE)
    if key and inner:
        deeper, name = re.match(r"[\w., ]+: ", inner[1]), re.search(r"no option '([^']+)'", inner[1])
        other = f"Here it is {key[1]}.init_args.{name[1] if name else ''}."  # what was given, of another class there
        told, is_other, _ = inner[1].partition(other)
        text = f"{told}The class that is chosen has none: leave it out, or choose another." if is_other else inner[1]
        return f"{key[1]}{'.' if deeper else ': '}{text}"

    refused = r"Option '([^']+)' is not accepted|Key '([^']+)' is not expected|does not accept option '([^']+)'"
    if found := re.search(refused, message):
        name = found[1] or found[2] or found[3]
        missing = re.findall(r"(?:Subclass|class) '([\w.]+)'", message)
        hint = _instead(name, [option.lstrip("-") for option in options])
        return f"{where}there is no option {name!r}{f' of {missing[0]}' if missing else ''}. {hint}"
    if found := re.search(r"unrecognized arguments?: ([^\s-]\S*\.ya?ml)", message):
        return f"A configuration file comes after --config. Given: {found[1]}. Write --config {found[1]}."
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
    if found := re.search(r"File does not exist: '?([^'\n]+?)'?\.?$", message, re.MULTILINE):
        return f"{where}the file {found[1]!r} does not exist. Check the path."
    if found := re.search(r'(?:Key|Option) "?([\w.]+)"? is required[^.]*', message):
        return f"{found[1]} is required but was not given. Add it to a --config file or the command line."
    if found := re.search(r"arguments are required: (.*)", message):
        command, _, _ = found[1].partition(".")
        names = [name.removeprefix(f"{command}.") for name in found[1].split(", ")]
        them = "it" if len(names) == 1 else "them"
        if names[0] == found[1].split(", ")[0]:  # a class's own, without the command before it
            return f"{', '.join(names)}: required, but not given. Set {them} among the init_args."
        return (
            f"{', '.join(names)}: required, but not given. Add {them} to a --config file or the command line, or start "
            f"from a whole one: lit-qrl {command} --config configs/quickstart.yaml."
        )
    if "is required" in message:
        return f"{where}{_first(message)} Add it to a --config file or the command line."
    if found := re.match(r"Unexpected config: (.*)", message):
        return f"A --config file holds no keys. Expected: YAML such as `data: {{group_size: 8}}`. Given: {found[1]}."
    expected = dict.fromkeys(re.findall(r"Expected (?:an? |value )?<class '(?:[\w.]*\.)?(\w+)'>", message))
    words = {"NoneType": "null", "bool": "true or false"}
    # A union may hold several lists, and of one list of numbers only the Subtypes say what they are.
    literals = [line for line in message.splitlines() if re.search(r"(?:Expected|Subtypes?).*?Literal\[", line)]
    if literals:
        listed = ",".join(re.findall(r"Literal\[([^\]]+)\]", literals[0]))
        choices = list(dict.fromkeys(choice.strip(" '\"") for choice in listed.split(",")))
        close = nearest(given[1].strip(), choices) if given else ""
        hint = f" {close}" if close.startswith("Did") else ""
        kinds = re.findall(r"<class '(?:[\w.]*\.)?(\w+)'>", literals[0])  # of the same union, as a number beside `auto`
        others = [words.get(str(kind), str(kind)) for kind in kinds if kind != "NoneType"]
        return f"{where}the value is not one of the choices. Expected: {', '.join([*others, *choices])}.{value}{hint}"
    if expected:
        kinds = " or ".join(words.get(str(kind), str(kind)) for kind in expected)
        return f"{where}the value has the wrong type. Expected: {kinds}.{value}"
    return f"{where}{_first(message)}{value}"


def _instead(name: str, options: Iterable[str]) -> str:
    """Return what an unknown option is called here, the nearest that there is, or where they are listed."""
    options = list(options)
    close = here(name) or nearest(name, options)
    told = close.startswith(("Did", "Here")) or (name.startswith("-") and len(options) <= OPTIONS_SHOWN)
    return close if told else SEE_HELP


def _first(message: str) -> str:
    lines = [line.strip(" -:") for line in message.splitlines()]
    telling = [line for line in lines if line and not line.startswith(("Parser key", "Subtypes", "Errors"))]
    return (telling[0] if telling else message.strip()).rstrip(".") + "."


def refused(error: Exception, settings: Mapping[str, Any]) -> ConfigError:
    """Return the paragraph for what the Trainer's constructor raised.

    Args:
        error: Lightning's own.
        settings: the Trainer's arguments by name.

    >>> print(refused(ValueError("You selected an invalid accelerator name: `accelerator='gpuu'`."),
    ...     {"accelerator": "gpuu", "devices": "auto"}))
    Lightning cannot build the Trainer: You selected an invalid accelerator name: `accelerator='gpuu'`. Given: \
trainer.accelerator: gpuu. Did you mean 'gpu'?
    """
    text = re.sub(r"<(?:\w+\.)*(\w+) object at 0x\w+>", r"\1", " ".join(str(error).split())).rstrip(".!")
    keys = [key for key, value in settings.items() if value is not None and re.search(rf"\b{key}\b", text)]
    keys = keys or [key for key in HARDWARE if settings.get(key, "auto") != "auto"]
    given = ", ".join(f"trainer.{key}: {_shown(settings[key])}" for key in keys)
    correct = f"Correct {' or '.join(f'trainer.{key}' for key in keys)}." if keys else "See lit-qrl fit --help."
    remedy = _remedy(text, settings) or correct
    return ConfigError(f"Lightning cannot build the Trainer: {text}.", given=given or None, remedy=remedy)


def _remedy(text: str, settings: Mapping[str, Any]) -> str:
    if settings.get("barebones"):
        return "Leave trainer.barebones out: a run needs its loggers and checkpoints."
    if "enable_checkpointing=False" in text:
        return "Leave it out: every run writes last.ckpt, with --checkpoint.every_n_iterations 0 once, at its end."
    from lightning.pytorch.accelerators import AcceleratorRegistry

    from lit_qrl import strategies

    here = [name for name in AcceleratorRegistry if AcceleratorRegistry[name]["accelerator"].is_available()]
    if "invalid accelerator name" in text:
        return nearest(str(settings["accelerator"]), ["auto", "gpu", *AcceleratorRegistry])
    if "gpu backend" in text or "accelerator is not available" in text:
        return f"Set trainer.accelerator to auto, or to what this machine has: {', '.join(here)}."
    if "invalid strategy name" in text:
        name, ours = str(settings["strategy"]), list(strategies.__all__)
        if name in ours:
            return f"{name} is a class: set trainer.strategy.class_path to it, as {shipped('configs/strategy')} does."
        return nearest(name, ["auto", "ddp", *ours])
    if "requires a GPU" in text:
        return "Set trainer.strategy to auto, or run where there is a GPU."
    if "precision" in text and "plugins" in text:
        return "Leave trainer.precision out: the plugin says what is computed in which precision."
    return ""


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value) if isinstance(value, (str, int, float, tuple)) else type(value).__name__


def of_run(error: Exception) -> ConfigError | None:
    """Return the paragraph for what Lightning finds wrong once a run has begun; None for anything else.

    Args:
        error: Lightning's own.

    >>> print(of_run(RuntimeError("Early stopping conditioned on metric `reward/men` which is not available. Pass in "
    ...     "or modify your `EarlyStopping` callback to use any of the following: `reward/mean`, `reward/std`")))
    EarlyStopping watches a metric that the run has not logged. Given: reward/men. Did you mean 'reward/mean'?
    """
    text = str(error)
    matches = ((who, re.match(words, text)) for who, words in WATCHES.items())
    who, found = next((pair for pair in matches if pair[1]), ("", None))
    if found is None:
        return None
    known = re.findall(r"[`']([^\s`']+)[`']", text[found.end() :].replace("`EarlyStopping`", ""))
    close = nearest(found[1], known)
    return ConfigError(
        f"{who} watches a metric that the run has not logged.",
        given=found[1],
        remedy=close
        if close.startswith("Did")
        else f"Set its monitor to a column of metrics.csv ({shipped('docs/metrics.md')}).",
    )


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


CALLED_ELSEWHERE = {
    "ckpt_path": "resume_from_checkpoint",
    "checkpoint.every_n_iterations": "save_steps save_freq",
    "data.engine.init_args.gpu_memory_utilization": "vllm_gpu_memory_utilization gpu_memory_utilization",
    "data.engine.init_args.tensor_parallel_size": "vllm_tensor_parallel_size tensor_model_parallel_size",
    "data.engine: VLLMEngine": "use_vllm",
    "data.engine: VLLMEngine is in the trainer's process, RemoteVLLMEngine in one of its own": "vllm_mode",
    "data.evaluation_greedy": "greedy",
    "data.evaluation_samples": "val_kwargs.n",
    "data.evaluation_size, problems of an evaluation": "per_device_eval_batch_size",
    "data.evaluation_temperature": "val_kwargs.temperature",
    "data.group_size": "num_generations rollout.n",
    "data.max_completion_tokens": "max_completion_length max_response_length",
    "data.max_prompt_tokens": "max_prompt_length",
    "data.max_tokens_per_micro_batch": "ppo_max_token_len_per_gpu",
    "data.micro_batches": "gradient_accumulation_steps",
    "data.micro_batches, their number": "ppo_micro_batch_size_per_gpu",
    "data.mini_batches": "steps_per_generation",
    "data.mini_batches, their number": "ppo_mini_batch_size",
    "data.passes": "num_iterations ppo_epochs",
    "data.prompts_per_iteration": "train_batch_size",
    "data.prompts_per_iteration, prompts over all devices": "per_device_train_batch_size",
    "data.prompts_per_iteration, without the completions of each": "generation_batch_size",
    "data.task.init_args.path": "dataset_name train_files",
    "data.temperature": "temperature",
    "model.lr_schedule": "lr_scheduler_type",
    "model.objective.init_args.clip_high": "epsilon_high clip_ratio_high",
    "model.objective.init_args.clip_low": "epsilon clip_ratio_low",
    "model.objective.init_args.clip_low and clip_high": "clip_ratio",
    "model.objective.init_args.entropy_coefficient": "entropy_coeff",
    "model.objective.init_args.kl_coefficient": "beta kl_coef kl_loss_coef",
    "model.objective.init_args.mask_truncated": "mask_truncated_completions",
    "model.objective.init_args.reduction: token for dapo, sequence for grpo. Others are classes: model.objective is "
    "DrGRPO for dr_grpo, CISPO for cispo, SAPO for sapo": "loss_type",
    "model.objective.init_args.reduction: token for token-mean, sequence for seq-mean-token-mean, sequence_sum for "
    "seq-mean-token-sum, constant for seq-mean-token-sum-norm": "loss_agg_mode",
    "model.objective.init_args.scale": "scale_rewards norm_adv_by_std_in_grpo",
    "model.objective: GRPO, DrGRPO and the others of configs/objective": "adv_estimator",
    "model.optimizer.init_args.lr": "learning_rate optim.lr",
    "model.policy.init_args.gradient_checkpointing": "gradient_checkpointing",
    "model.policy.init_args.model": "model_name_or_path model.path",
    "model.warmup": "warmup_ratio",
    "seed_everything": "seed",
    "trainer.callbacks: configs/correction has files to add with --config": "vllm_importance_sampling_cap "
    "vllm_importance_sampling_correction rollout_is rollout_is_threshold",
    "trainer.check_val_every_n_epoch": "test_freq",
    "trainer.check_val_every_n_epoch, in iterations": "eval_steps",
    "trainer.default_root_dir": "output_dir",
    "trainer.gradient_clip_val": "max_grad_norm grad_clip",
    "trainer.logger": "report_to",
    "trainer.max_epochs, which counts iterations": "max_steps num_train_epochs total_epochs",
}
"""By the option here, and behind a comma or colon what else is to be known of it: what TRL and verl call it, of verl as
many parts from the end as tell it from others."""
OTHER_NAMES = {name: option for option, names in CALLED_ELSEWHERE.items() for name in names.split()}


def here(name: str) -> str | None:
    """Return what an option of others is here, as a sentence, or None for one that is not known.

    >>> here("--num_generations"), here("actor_rollout_ref.rollout.n"), here("data.rollout")
    ('Here it is data.group_size.', 'Here it is data.group_size.', None)
    """
    parts = name.lstrip("-").split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    found = next((OTHER_NAMES[end] for end in ends if end in OTHER_NAMES), None)
    return found and f"Here it is {found}."
