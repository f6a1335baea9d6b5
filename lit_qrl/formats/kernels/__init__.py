"""Low-bit matrix products and quantizers, and the choice between Triton and plain operations."""
