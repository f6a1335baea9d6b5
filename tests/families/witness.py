"""What a sampler and a learner said of a rollout, beside a plain forward pass of the library."""

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from lit_qrl.loop.hooks import RLCallback
from lit_qrl.precision import QATAligned
from lit_qrl.publish.probe import computing_as


class Difference(AssertionError):
    """Two sides that should agree do not."""


class Witness(RLCallback):
    """Compares what the engine and the learner said of each rollout with a plain forward pass of the library.

    Args:
        format: that the sampler computes in, over the merged weights; None where the merged weights are what it has.
    """

    def __init__(self, format: Any = None) -> None:
        self.format = format
        self.sampler: list[torch.Tensor] = []
        self.learner: list[torch.Tensor] = []
        self.seen: list[torch.Tensor] = []

    @torch.no_grad()
    def on_rollout_end(self, trainer, module, batch):
        plugin = trainer.precision_plugin
        plain = reference(module.policy)
        rows = batch.select(torch.arange(4))
        expected = forward(plain, rows, self.format, getattr(plugin, "exclude", ()))
        mask = rows.mask
        self.sampler.append((rows.sampler_logprobs - expected)[mask].abs())
        module.policy.eval()
        with plugin.forward_context():
            own = module.policy(rows).logprobs
        module.policy.train()
        aligned = isinstance(plugin, QATAligned)
        self.learner.append((own - (expected if aligned else forward(plain, rows)))[mask].abs())
        self.seen.append(torch.cat([p.detach().flatten()[:64].float() for p in plain.parameters()]))


def reference(policy: Any) -> Any:
    """Return the library's own model with the policy's weights, adapters merged, in fp32 with eager attention."""
    config = copy.deepcopy(policy.config)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        weights = {name: tensor.float() for name, tensor in policy.named_weights()}
    unknown = network.load_state_dict(weights, strict=False).unexpected_keys
    assert not unknown, unknown
    network.tie_weights()
    return network.eval()


def forward(network: Any, batch: Any, format: Any = None, exclude: Any = ()) -> torch.Tensor:
    """Return the log-probs "b t" of the completions, one sequence at a time, without padding and without a cache."""
    width = batch.tokens.shape[1] - batch.mask.shape[1]
    scores = torch.zeros(batch.mask.shape)
    for row in range(len(batch)):
        start, length = width - int(batch.prompt_length[row]), int(batch.mask[row].sum())
        ids = batch.tokens[row, start : width + length][None]
        with computing_as(network, format, exclude):
            logits = network(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
        chosen = logits[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        scores[row, :length] = chosen[-length:]
    return scores
