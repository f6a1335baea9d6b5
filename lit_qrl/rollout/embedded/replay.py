"""When the embedded engine decodes in slots, by steps that a GPU replays, and when by launching every kernel."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from lit_qrl.errors import ConfigError
from lit_qrl.network.routing import routers
from lit_qrl.network.structure import PLAIN_ATTENTION
from lit_qrl.precision.layers.one_pass import take_one_pass
from lit_qrl.rollout.embedded.attention import FOLDED
from lit_qrl.rollout.embedded.decode import Decoder, Drawn, Piece, Random, windowed
from lit_qrl.rollout.embedded.leaving import Gone
from lit_qrl.rollout.embedded.shortage import Shortage, freed
from lit_qrl.rollout.embedded.slots import SlotDecoder
from lit_qrl.rollout.embedded.step_norm import take_step_norms
from lit_qrl.rollout.graphs import Trust

log = logging.getLogger(__name__)

CudaGraphs = bool | Literal["auto"]
SLOTS = 512
"""Most rows at once where `max_batch` does not say: more hardly raise the speed, and take memory for their logits."""

WORD_BYTES = 16
"""Of each row and word while a token is drawn: logits, scores, their exponentials and running sums."""


def unfit(network: Any) -> str | None:
    """Return why a model does not decode in slots, or None.

    Args:
        network: the sampler's Hugging Face model.
    """
    config = network.config
    if config.model_type not in PLAIN_ATTENTION:
        return f"{config.model_type} models are not known to attend over their whole past alone"
    if config._attn_implementation != FOLDED:
        return f"its attention is {config._attn_implementation}"
    if windowed(config):
        return "some of its layers have a window"
    if routers(network):
        return "its experts are chosen token by token"
    turned = {getattr(part, "rope_type", None) for part in network.modules()} & {"dynamic", "longrope"}
    return f"its rotary embedding is {turned.pop()}, which depends on the batch" if turned else None


class Replay:
    """Whether and how an engine decodes in slots.

    Args:
        choice: `auto` does so on a GPU; True on a CPU too, where steps are launched; False nowhere.

    Raises:
        ConfigError: for anything else.
    """

    def __init__(self, choice: CudaGraphs) -> None:
        if choice not in (True, False, "auto"):
            raise ConfigError("engine.cuda_graphs is unknown.", expected="auto, true, false", given=choice)
        self.choice, self.trust, self.possible = choice, Trust(), False

    def prepare(self, network: Any, device: torch.device, invariant: bool, records: bool) -> None:
        """Look at a sampler that has no weights yet; what keeps it from decoding in slots is logged.

        Args:
            network: the sampler's; on a GPU its norms, gated MLPs and rotary embeddings take one kernel from now on.
            device: of its weights.
            invariant: tokens have to compute alike in every batch.
            records: rollouts record experts or kept words, so that evaluations alone decode in slots.
        """
        self.trust, self.possible = Trust(), False
        if not self.choice or (self.choice == "auto" and device.type != "cuda"):
            return
        why = "batch_invariant is on" if invariant else unfit(network)
        if why is not None:
            level = logging.INFO if self.choice == "auto" else logging.WARNING
            log.log(level, "The embedded engine decodes without CUDA graphs: %s.", why)
            return
        self.possible = True
        if records:
            log.info("Rollouts are decoded without CUDA graphs: what each token was drawn among is recorded.")
        if device.type == "cuda":
            take_one_pass(network)
            take_step_norms(network)

    def draw(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        n: int,
        most: int,
        random: Random,
        report: Callable[[int, int], None],
        shortage: Shortage,
        gone: Gone | None = None,
    ) -> tuple[list[Piece], Drawn]:
        """Return the completions of one call; where memory runs out they are drawn again in half of the slots.

        Args:
            decoder: the model, and how tokens are drawn.
            prompts: of the call.
            n: completions of each.
            most: rows that fit.
            random: what the tokens are drawn with.
            report: called now and then with (sequences ended, tokens drawn).
            shortage: what is known of the memory.
            gone: takes completions that have ended while others are drawn, by their numbers, prompt-major.
        """
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        pieces = [Piece(prompt, 0, n, len(prompts[prompt])) for prompt in order]
        longest = pieces[0].length + decoder.sampling.max_tokens

        handed = None if gone is None else lambda rows, drawn: gone([order[i // n] * n + i % n for i in rows], drawn)
        slots = max(1, min(len(prompts) * n, most, shortage.fitting // longest))
        while True:
            try:
                return pieces, SlotDecoder(decoder, slots, self.trust).run(prompts, pieces, random, report, handed)
            except (RuntimeError, MemoryError) as error:
                self.trust.former = None
                slots = freed(error, slots, "decoded")
                shortage.fitting = slots * longest
