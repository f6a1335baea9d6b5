"""The command `lit-qrl`: LightningCLI for training, and functions for the rest."""

import gc
import importlib
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from lit_qrl.cli import TRAINING
from lit_qrl.errors import EXIT_CONFIG, EXIT_STOPPED, ConfigError, StoppedError, nearest
from lit_qrl.run.console import outlast_readers  # whose clock starts with the command
from lit_qrl.run.imports import uncollected
from lit_qrl.run.interrupt import Interrupted, Interruption, deadline
from lit_qrl.run.torch_settings import let_segments_grow
from lit_qrl.shipped import SHIPPED

MOMENT = 5.0
"""Seconds that a process which fails gives the first one of its run to say why, and to end it."""

HELP = re.compile(r"-h|--([\w.]+\.)?help(=.*)?|--print_config(=.*)?")
"""Words with which a command prints something and ends."""

QUICKSTART = ("fit", "--config", "configs/quickstart.yaml")
"""What `lit-qrl quickstart` stands for, before whatever follows it."""
PRINTS = ("--version", "--versions")
"""Other first words with which nothing is done but printed."""
COMMANDS = {
    "audit": "measure the mismatch of each number format for a model, without training",
    "export": "write a run's policy as a Hugging Face folder: plain, quantized, or its adapter",
    "quantize": "write a model in a number format of 4 or 8 bits, for vLLM, transformers and fit",
    "serve": "start vLLM's server with the flags by which it takes a run's weights, for runs on other hosts",
    "report": "make the HTML report of one run folder, or compare several",
}


def main(args: Sequence[str] | None = None) -> None:
    """Run `lit-qrl`; one paragraph and status 2 for what cannot work as given, 70 for a run that could not go on."""
    if args is None and (prints_only(sys.argv[1:]) or (sys.argv[1:2] and sys.argv[1] in PRINTS)):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # behind a pipe, `head` may have enough before all is printed
    own, args = args is None, list(sys.argv[1:] if args is None else args)
    if args[:1] == ["quickstart"]:
        args = [*QUICKSTART, *args[1:]]
    word = args[0] if args else "--help"
    if word in ("-h", "--help"):
        print(overview())
        return
    if word == "--version":
        from lit_qrl import __version__

        print(f"lit-qrl {__version__}")
        return
    if word == "--versions":
        from lit_qrl.cli.versions import versions

        print(versions())
        return
    outlast_readers()
    let_segments_grow()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # NCCL's advice, from below Python
    warnings.filterwarnings("ignore", category=SyntaxWarning, module=r".*\btorchao\b")  # when it is first imported
    if os.getcwd() not in sys.path:
        # So that `class_path: my_file.MyCallback` finds the user's own code; last, or a torch.py there would be torch.
        sys.path.append(os.getcwd())
    try:
        if word in COMMANDS:
            with uncollected():
                from lit_qrl.cli.parser import run

                command = getattr(importlib.import_module(f"lit_qrl.cli.{word}"), word)
            run(command, args[1:])
        elif word in TRAINING:
            deadline.enabled = own and not prints_only(args)
            run_training(args)
        else:
            raise ConfigError(
                f"{word!r} is not a command of lit-qrl.", remedy=nearest(word, ["quickstart", *TRAINING, *COMMANDS])
            )
    except ConfigError as error:
        fail(str(error))
    except StoppedError as error:
        fail(str(error), EXIT_STOPPED)
    except KeyboardInterrupt as error:
        interrupted = error if isinstance(error, Interrupted) else Interrupted(signal.SIGINT)
        deadline.arrived()
        deadline.begin(interrupted.number)  # threads of a user may keep the interpreter
        if interrupted.told:  # a training has said where it stands
            sys.exit(interrupted.status)
        fail(f"{word} was {interrupted}, and no training was under way.", interrupted.status)


def fail(message: str, status: int = EXIT_CONFIG) -> NoReturn:
    """Print one paragraph, on the first rank of a run or on one that alone has something to say, and exit."""
    import textwrap

    rank = max(int(os.environ.get(name) or 0) for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"))
    parent, until = os.getppid(), time.monotonic() + MOMENT
    while rank and time.monotonic() < until:  # what started it ends it too, where the first one ends by the same
        if os.getppid() != parent:
            sys.exit(status)
        time.sleep(0.1)

    message = f"Rank {rank}: {message}" if rank else message
    paragraph = textwrap.fill(f"lit-qrl: {message}", 110, break_long_words=False, break_on_hyphens=False)
    print(f"\n{paragraph}\n", file=sys.stderr)
    sys.exit(status)


def overview() -> str:
    """Return the help that lists every command."""
    quickstart = {"quickstart": f"train a small policy that ships, in minutes: {' '.join(QUICKSTART)}"}
    lines = ["usage: lit-qrl COMMAND [options]", "", "Quantized reinforcement learning of language models.", ""]
    lines += [f"  {name:<10} {text}" for name, text in {**quickstart, **TRAINING, **COMMANDS}.items()]
    return "\n".join(
        [
            *lines,
            "",
            "lit-qrl fit --config configs/quickstart.yaml",
            "lit-qrl fit --config configs/quickstart.yaml --config configs/correction/tis.yaml --trainer.max_epochs 20",
            "lit-qrl fit --config … --print_config   shows the effective configuration",
            "lit-qrl COMMAND --help                  lists every option of a command",
            "lit-qrl fit --config … --dry_run        checks everything, shows memory and prompts, loads no weights",
            "lit-qrl --versions                      lists libraries, accepted versions of vLLM, patches of its code",
            "",
            "Paths under configs/, models/ and docs/ that the working directory does not have are taken from",
            f"  {SHIPPED}",
        ]
    )


def prints_only(args: Sequence[str]) -> bool:
    """Return whether a command prints its help or its configuration and computes nothing.

    >>> prints_only(["fit", "--print_config=comments"]), prints_only(["fit", "--config", "a.yaml"])
    (True, False)
    >>> prints_only(["fit", "-h"]), prints_only(["fit", "--trainer.strategy.help", "ColocatedStrategy"])
    (True, True)
    """
    return any(HELP.fullmatch(word) for word in args)


def run_training(args: Sequence[str]) -> Any:
    """Run a Trainer command and return the CLI object."""
    signals = Interruption()
    signals.install()  # a run has its own while it trains
    try:
        with uncollected():
            from lightning.pytorch.utilities.exceptions import MisconfigurationException

            from lit_qrl.cli.errors import exited, of_disk
            from lit_qrl.cli.training import QRLCLI

        if deadline.enabled:  # the process ends with the run, and nothing that libraries hold becomes garbage before
            gc.freeze()  # so an engine that starts need not look through it all, which it does several times
        try:
            return QRLCLI.run(list(args))
        except MisconfigurationException as error:  # Lightning's own word for a configuration that cannot work
            raise ConfigError(" ".join(str(error).split())) from error
        except SystemExit as error:
            if prints_only(args):
                raise
            raise StoppedError(exited(error, QRLCLI.folder)) from error
        except OSError as error:
            if (known := of_disk(error, QRLCLI.folder)) is None:
                raise
            raise StoppedError(known) from error
    finally:
        gc.unfreeze()  # else libraries complain at the process's end of what is left of them
        signals.remove()


if __name__ == "__main__":
    main()
