import torch

from lit_qrl.receipts.checksum import Checksums


def test_what_is_found_on_the_host_needs_no_waiting():
    collected = Checksums()
    collected.add("good", torch.ones(8))
    assert collected.first_non_finite(wait=False) is None
    collected.add("bad", torch.tensor([1.0, float("nan")]))
    collected.add("worse", torch.tensor([float("inf")]))
    assert collected.first_non_finite(wait=False) == collected.first_non_finite() == "bad"
    assert [finite for _, finite in collected.finish().values()] == [True, False, False]
