"""The command `lit-qrl`: training through LightningCLI, and the other commands."""
