"""One iteration of reinforcement learning: the hooks, the algorithm, its state, how corrections combine."""
