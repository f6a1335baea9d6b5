"""The platform keeps the name of the last engine's pool of CUDA graphs.

Torch refuses a capture into a pool whose graphs are all gone while some of its memory is not yet given back.
"""

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions


def forget_graph_pool() -> None:
    """Let the next engine capture its graphs in a pool of its own."""
    from vllm.platforms import current_platform

    type(current_platform)._global_graph_pool = None


PATCH = Patch(
    __name__,
    Versions("0.26"),
    "an engine's end gives its pool's name up",
    needs=["vllm.platforms.interface:Platform._global_graph_pool"],
)
