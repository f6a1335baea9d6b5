import torch

from lit_qrl.publish.delivery import weigh
from lit_qrl.receipts.ledger import PublishReport, ReceivedLedger, SentLedger


def test_shares_count_bytes():
    sent, received = SentLedger(0), ReceivedLedger(0, unread=["experts.up"])
    sent.record("a.weight_packed", torch.zeros(8, 4, dtype=torch.uint8))
    sent.record("a.weight_scale", torch.zeros(8, dtype=torch.float32))
    sent.record("a.bias", torch.zeros(8))
    sent.record("norm.weight", torch.zeros(8))
    sent.record("experts.up", torch.zeros(2, 8, 8))
    layers = {"a.weight": "int4_group", "a.bias": "fp32", "norm.weight": "fp32", "experts.up": "fp32"}
    report = PublishReport(version=0, seconds=0.0, bytes=0, layers=layers, received=received)
    weigh(report, sent, {"a": (8, 8)})
    assert report.sizes == {"a.weight": 32 + 32, "a.bias": 32, "norm.weight": 32, "experts.up": 512}
    assert report.quantized_share == 64 / (64 + 8 + 8 + 128)
    assert report.verified_share == 128 / 640
