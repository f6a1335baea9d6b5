"""The command `lit-qrl`: training through LightningCLI, and the other commands."""

TRAINING = {
    "fit": "train a policy with reinforcement learning",
    "validate": "evaluate on the held-out problems",
    "test": "evaluate and log under test/",
    "predict": "sample completions of the held-out problems",
}
"""Commands of the Trainer, and what they do."""
