"""vLLM's operators for the learner, the only place of the plugins that names vLLM."""
