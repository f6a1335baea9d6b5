"""Lightning callbacks with the hooks of reinforcement learning."""
