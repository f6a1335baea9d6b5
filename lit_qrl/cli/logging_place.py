"""Lightning's loggers write into the run folder where no other place is named."""

import inspect
from pathlib import Path
from typing import Any

from lightning.pytorch import loggers
from lightning.pytorch.loggers import Logger


def let_place_be_left_out() -> None:
    """Make `save_dir` of every logger optional for the parser, which reads signatures; the constructors stay."""
    for logger in vars(loggers).values():
        if isinstance(logger, type) and issubclass(logger, Logger):
            signature = inspect.signature(logger.__init__)
            place = signature.parameters.get("save_dir")
            if place is not None:
                kind = Any if place.annotation is inspect.Parameter.empty else place.annotation
                without = place.replace(default=None, annotation=kind | None)
                parts = {**signature.parameters, "save_dir": without}.values()
                logger.__init__.__signature__ = signature.replace(parameters=list(parts))  # pyright: ignore


def give_place(chosen: Any, run_folder: Path) -> None:
    """Set the `save_dir` that was left out to the run folder.

    Args:
        chosen: `trainer.logger` as it was parsed: one logger, several, or none.
        run_folder: of the run.
    """
    for logger in chosen if isinstance(chosen, list) else [chosen]:
        arguments = getattr(logger, "init_args", None)
        if arguments is not None and "save_dir" in arguments and arguments.save_dir is None:
            arguments.save_dir = str(run_folder)
