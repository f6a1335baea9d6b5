"""Lightning callbacks with the hooks of reinforcement learning."""

from lit_qrl.callbacks.ais import AIS
from lit_qrl.callbacks.aqn import AQNNoise
from lit_qrl.callbacks.checkpoint import RunCheckpoint
from lit_qrl.callbacks.guard import Guard
from lit_qrl.callbacks.memory_limit import MemoryLimit
from lit_qrl.callbacks.mismatch import MismatchMonitor
from lit_qrl.callbacks.progress import RLProgress
from lit_qrl.callbacks.publisher import WeightPublisher
from lit_qrl.callbacks.rejection import GeometricRejection, OffPolicySequenceMask, RatioRejection, TokenVeto
from lit_qrl.callbacks.report import Report
from lit_qrl.callbacks.router_replay import RouterReplay
from lit_qrl.callbacks.router_shift import RouterShift
from lit_qrl.callbacks.truncated import MaskedIS, TruncatedIS
from lit_qrl.loop.hooks import RLCallback

__all__ = [
    "AIS",
    "AQNNoise",
    "GeometricRejection",
    "Guard",
    "MaskedIS",
    "MemoryLimit",
    "MismatchMonitor",
    "OffPolicySequenceMask",
    "RLCallback",
    "RLProgress",
    "RatioRejection",
    "Report",
    "RouterReplay",
    "RouterShift",
    "RunCheckpoint",
    "TokenVeto",
    "TruncatedIS",
    "WeightPublisher",
]
