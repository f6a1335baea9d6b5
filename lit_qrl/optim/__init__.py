"""Optimizers, what keeps their updates from being rounded away, and learning-rate schedules."""

from lit_qrl.optim.muon import MuonAdamW

__all__ = ["MuonAdamW"]
