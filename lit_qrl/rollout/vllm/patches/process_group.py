"""The end of an engine ends torch's default process group, through which the trainer's processes are joined.

`shutdown` ends what the engine has made, and no more.
"""

from typing import Any

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions


def kept(original: Any) -> Any:
    """Return what ends nothing."""

    def cleanup_dist_env_and_memory(*args: Any, **options: Any) -> None:
        del args, options

    return cleanup_dist_env_and_memory


PATCH = Patch(
    __name__,
    Versions("0.32"),
    "an engine in the trainer's process leaves a group alone that was there before it",
    {"vllm.v1.engine.core:cleanup_dist_env_and_memory": kept},
)
