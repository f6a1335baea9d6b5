"""What an evaluation is of, asked of any engine."""

import torch

from lit_qrl.callbacks import RLCallback
from lit_qrl.publish.probe import learner_scores


class Distance(RLCallback):
    """Keeps per evaluation how far the engine's log-probs are from those of the learner's own forward pass, in nats."""

    def __init__(self):
        self.seen = []

    def on_validation_end(self, trainer, pl_module):
        tokens = torch.randint(20, (4, 16), generator=torch.Generator().manual_seed(0)).tolist()
        pairs = zip(pl_module.data.engine.score(tokens), learner_scores(pl_module.policy.network, tokens), strict=True)
        self.seen.append(max(float((one - other).abs().max()) for one, other in pairs))
