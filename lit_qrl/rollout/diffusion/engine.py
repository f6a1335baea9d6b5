"""The engine of masked diffusion: the sampler as Hugging Face modules in this process, on the CPU or a GPU."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_qrl.errors import ConfigError, check_choice
from lit_qrl.functional.logprobs import softmax_logprobs, token_logprobs
from lit_qrl.network.denoising import Estimator, Head, check_denoises, without_mask_token
from lit_qrl.network.head import SamplerHead
from lit_qrl.network.memory import free_memory
from lit_qrl.network.structure import cached_numbers
from lit_qrl.precision.layers.one_pass import take_one_pass
from lit_qrl.rollout.diffusion.decode import Denoised, Denoiser, Reuse
from lit_qrl.rollout.embedded.decode import plan
from lit_qrl.rollout.embedded.sampler import SCORE_TOKENS, EmbeddedSampler, computed
from lit_qrl.rollout.engine import EnginePolicy, Progress, SamplerSpec
from lit_qrl.rollout.graphs import Trust
from lit_qrl.seeding import derive_seed
from lit_qrl.types import Completion, RolloutBatch, SamplingParams

CPU_TOKENS = 2**15
"""Tokens of one forward on a CPU: a few hundred MB of activations for a small model."""
GPU_SHARE = 0.5
"""Share of the free GPU memory for the activations of a forward; the rest is for logits and update."""


class DiffusionEngine(EmbeddedSampler):
    """Draws completions of a masked-diffusion model in blocks, from left to right (LLaDA's low-confidence remasking).

    A completion begins as masks. Each step draws a token for every masked position of the block, and the ones that the
    model is surest of stay. A sequence ends with the first block that holds a stop token. The log-probs of a completion
    are the policy's estimates, by the sampler's weights, under masks that the learner uses too.

    Args:
        block: positions of a block; the completion limits are multiples of it.
        steps: steps of a block, which divide `block`; null unmasks two tokens in each, as the AIS paper does.
        reuse: `none` computes every step on the whole sequence, which is exact. In bidirectional attention all keys and
            values change with every token, so that keeping some is an approximation: `prompt` keeps those of the prompt
            and of finished blocks, `blocks` those of the blocks to come too, each from the first step of a block on.
        max_batch: sequences drawn at once; null takes what memory allows. Where memory runs out all the same, the
            batch is halved until it fits.
        dtype: what unquantized tensors are cast to; `auto` keeps them as they are published.
        share: `auto` holds the learner's own tensors where nothing was changed, `never` copies.
        keep_operands: let quantized layers keep their dequantized weights between calls: faster, more memory.
        graphs: on a GPU, replay the steps of a batch as one CUDA graph, for models whose layers are a Llama's. The
            first graph of all is compared with the launched step; should they differ, steps are launched.

    Raises:
        ConfigError: for steps that do not divide a block.
    """

    denoises = True

    def __init__(
        self,
        block: int = 32,
        steps: int | None = None,
        reuse: Reuse = "none",
        max_batch: int | None = None,
        dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
        share: Literal["auto", "never"] = "auto",
        keep_operands: bool = True,
        graphs: bool = True,
    ) -> None:
        super().__init__(max_batch, dtype, share, keep_operands)
        check_choice("data.engine.reuse", reuse, ("none", "prompt", "blocks"))
        if block < 1:
            raise ConfigError("data.engine.block is too small.", expected="at least 1", given=block)
        steps = max(block // 2, 1) if steps is None else steps
        if steps < 1 or block % steps:
            divisors = [count for count in range(1, block + 1) if block % count == 0]
            raise ConfigError(
                "data.engine.steps does not divide a block.",
                expected=f"a divisor of {block}: {', '.join(map(str, divisors))}",
                given=steps,
                remedy=f"Set it to {min(divisors, key=lambda count: abs(count - steps))}, or change data.engine.block.",
            )
        self.block, self.steps = block, steps
        self.graphs = Trust() if graphs else None
        self.reuse: Reuse = reuse

    def validate(self, spec: SamplerSpec) -> None:
        super().validate(spec)
        self._check_length(spec.sampling.max_tokens, "data.max_completion_tokens")
        for limit in spec.evaluation_limits:
            self._check_length(limit, "The completion_tokens of an evaluation")
        estimator = spec.estimator
        if estimator is not None and estimator.kind == "blocks" and estimator.block != self.block:
            raise ConfigError(
                "The policy scores other blocks than the engine draws.",
                expected=f"model.policy.block: {self.block}",
                given=estimator.block,
                remedy="Give model.policy.block and data.engine.block the same number.",
            )

    def _check_length(self, length: int, name: str) -> None:
        if length % self.block:
            below, above = length // self.block * self.block, -(-length // self.block) * self.block
            raise ConfigError(
                f"{name} is no multiple of a block.",
                expected=f"a multiple of data.engine.block, {self.block}",
                given=length,
                remedy=f"Set it to {above}{f' or {below}' if below else ''}, or change data.engine.block.",
            )

    def check_model(self, network: nn.Module) -> None:
        """Raise `ConfigError` for a causal model, or one without a mask token."""
        check_denoises(network.config)

    def setup(self, spec: SamplerSpec, policy: EnginePolicy) -> None:
        super().setup(spec, policy)
        assert self._modules is not None
        if self._modules.device.type == "cuda":
            take_one_pass(self._modules.network)

    # ----------------------------------------------------------------------------------------------------- generation

    @computed
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        seed: int,
        progress: Progress | None = None,
        sampling: SamplingParams | None = None,
        positions: Sequence[int] | None = None,
    ) -> list[Completion]:
        sampling = sampling or self.spec.sampling
        places = range(len(prompts)) if positions is None else positions
        self._check_length(sampling.max_tokens, "The completion limit")
        self._check(prompts, sampling)
        denoiser = Denoiser(
            self.network, sampling, self.block, self.steps, self.reuse, self.spec.head_dtype, self.graphs
        )

        def seed_of(what: str, prompt: int, index: int) -> int:
            return derive_seed(seed, what, places[prompt], index)

        def masks_of(rows: list[int]) -> list[int]:
            return [seed_of("mask", *divmod(row, n)) for row in rows]

        def draw(report: Progress, rows: list[int], _: int) -> Denoised:
            drawn = denoiser.run(prompts, n, rows, partial(seed_of, "noise"), report)
            batch = _batch_of([prompts[row // n] for row in rows], drawn, masks_of(rows))
            drawn.logprobs = self._estimate(batch, sampling.temperature or 1.0)
            return drawn

        def read(rows: list[int], drawn: Denoised) -> list[Completion]:
            found = drawn.completions(self.version)
            steps = drawn.unmasked_at.tolist()
            for one, seed, unmasked_at in zip(found, masks_of(rows), steps, strict=True):
                one.mask_seed, one.drawn_over = seed, len(unmasked_at)
                one.unmasked_at = unmasked_at[: len(one.token_ids)]
            return found

        batches = plan([len(p) for p in prompts], n, sampling.max_tokens, self._room(), self.max_batch)
        return self._in_batches(prompts, n, batches, sampling.max_tokens, draw, read, progress)

    def _room(self) -> int:
        """Return how many tokens a forward has memory for."""
        weight, config = self.network.get_input_embeddings().weight, self.network.config
        if weight.device.type != "cuda":
            return CPU_TOKENS
        numbers = 8 * config.hidden_size + 3 * config.intermediate_size
        numbers += 0 if self.reuse == "none" else cached_numbers(config)
        return int(free_memory(weight.device) * GPU_SHARE) // (numbers * weight.dtype.itemsize)

    # -------------------------------------------------------------------------------------------------------- scoring

    @computed
    def estimate(self, rollout: RolloutBatch) -> Tensor:
        """Return the sampler's estimates "b t" of a rollout's log-probs, under the masks of its seeds."""
        self._check_current()
        return self._estimate(rollout, self.spec.sampling.temperature)

    @torch.no_grad()
    def _estimate(self, batch: RolloutBatch, temperature: float) -> Tensor:
        network, device = self.network, self.network.get_input_embeddings().weight.device
        head = self._head(temperature)
        estimator = self.spec.estimator or Estimator()
        share = max(1, SCORE_TOKENS // batch.tokens.shape[1])
        parts = [torch.arange(first, min(first + share, len(batch))) for first in range(0, len(batch), share)]
        found = []
        for rows in parts:
            part = batch.select(rows.to(batch.tokens.device), trim=False).to(device)
            found.append(torch.where(part.mask, estimator(network, head, part)[0], 0.0))
        return torch.cat(found).to(batch.tokens.device)

    def _head(self, temperature: float) -> Head:
        """Return what makes log-probs of hidden states: as the learner does where the head is plain."""
        mask_token = self.network.config.mask_token_id
        head = SamplerHead.of(self.network, self.spec.head_dtype)
        plain: dict[str, Any] | None = head.plain
        if plain is not None:
            plain["bias"] = without_mask_token(plain["bias"], plain["weight"], mask_token)

        def logprobs(hidden: Tensor, tokens: Tensor) -> Tensor:
            if plain is not None:
                return token_logprobs(hidden, tokens=tokens, temperature=temperature, **plain)[0][None]
            logits = head.logits(hidden).float()
            logits[..., mask_token] = float("-inf")
            return softmax_logprobs(logits, tokens, temperature)[None]

        return logprobs


def _batch_of(owners: Sequence[Sequence[int]], drawn: Denoised, seeds: Sequence[int]) -> RolloutBatch:
    """Return completions, each with its prompt, as a batch whose log-probs can be estimated."""
    device, b = drawn.tokens.device, len(drawn.tokens)
    width, length = max(map(len, owners)), drawn.tokens.shape[1]
    prompt = torch.tensor([[*[0] * (width - len(one)), *one] for one in owners])
    mask = torch.arange(length, device=device) < drawn.length[:, None]
    nothing = torch.zeros(b, dtype=torch.float32, device=device)
    return RolloutBatch(
        tokens=torch.cat([prompt.to(device), drawn.tokens.masked_fill(~mask, 0)], dim=1),
        prompt_length=torch.tensor([len(one) for one in owners], device=device),
        mask=mask,
        sampler_logprobs=torch.zeros(b, length, dtype=torch.float32, device=device),
        rewards=nothing,
        advantages=nothing,
        group=torch.zeros(b, dtype=torch.long, device=device),
        version=torch.zeros(b, dtype=torch.long, device=device),
        stopped=drawn.stopped,
        mask_seed=torch.tensor(seeds, device=device),
        drawn_over=torch.full((b,), length, device=device),
    )
