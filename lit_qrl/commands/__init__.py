"""Commands beside the Trainer's: audit, export, quantize, report."""
