"""What learner and sampler ask of a Hugging Face model: head, linear layers, names, packing, folders."""
