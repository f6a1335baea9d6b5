"""Pure tensor maths: no state, no I/O, no Lightning."""
