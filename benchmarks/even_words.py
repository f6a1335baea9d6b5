"""A reward that costs nothing and differs within a group: the share of even words."""

from lit_qrl.rewards.base import Reward


class EvenWords(Reward):
    """Share of words that end with an even digit."""

    name = "even"

    def __call__(self, samples):
        """Return one share per sample."""
        words = [sample.completion.split() for sample in samples]
        return [sum(word[-1] in "02468" for word in one) / max(len(one), 1) for one in words]
