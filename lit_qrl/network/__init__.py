"""What learner and sampler ask of a Hugging Face model: structure, names, layers, head, adapters, streams, folders."""

import sys

if "bitsandbytes" not in sys.modules:
    # Where it is installed peft loads it, and with it torch's compiler, for layers that only its own 4-bit and 8-bit
    # models have: a fifth of the time that `lit-qrl fit` takes to start. What needs it loads it later.
    sys.modules["bitsandbytes"] = None  # pyright: ignore[reportArgumentType]
    try:
        import peft  # noqa: F401
    finally:
        del sys.modules["bitsandbytes"]
