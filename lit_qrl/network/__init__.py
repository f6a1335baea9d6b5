"""What learner and sampler ask of a Hugging Face model: structure, names, layers, head, adapters, streams, folders."""
