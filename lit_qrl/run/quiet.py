"""Silence for the advice of Lightning and transformers that does not apply to reinforcement learning."""

import logging
import sys
import warnings


def _tells(record: logging.LogRecord) -> bool:
    """Return whether a message says more than advice: a fault, or that a limit of time ends the run."""
    return record.levelno >= logging.WARNING or "Signaling Trainer to stop" in record.getMessage()


def quiet() -> None:
    """Silence that advice, and let what this library says be seen."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_tells)
    for name in ("lightning.fabric.utilities.seed", "lightning.pytorch.accelerators.cuda"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for pattern in (
        "LightningCLI's args parameter.*",
        ".*does not have many workers.*",
        ".*smaller than the logging interval.*",
        ".*`training_step` returned",
        ".*`IterableDataset` has `__len__` defined.*",
        r".*module\(s\) in eval mode.*",  # a policy is trained without dropout
        ".*LeafSpec.*is deprecated.*",  # Lightning's own use of torch
        "Starting from v1.9.0, `tensorboardX`",  # `metrics.csv` is written whatever other logger there is
    ):
        warnings.filterwarnings("ignore", pattern)
    if "transformers" in sys.modules:  # a command that only prints has not loaded it
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
    ours = logging.getLogger("lit_qrl")
    if not ours.handlers:
        screen = logging.StreamHandler()
        screen.setLevel(logging.INFO)
        ours.addHandler(screen)
    ours.setLevel(logging.DEBUG)  # what is for nobody but a maintainer goes to the run's file
