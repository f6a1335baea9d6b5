"""What a run may take of its GPU, whose driver and allocator are played by the test."""

from types import SimpleNamespace

import pytest
import torch

from lit_qrl.callbacks import MemoryLimit
from lit_qrl.errors import ConfigError


def set_up(limit, device="cuda:0"):
    limit.setup(SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device))), None, "fit")


@pytest.fixture
def shares(monkeypatch):
    """Return what torch's allocator is told of a GPU of 80 GiB."""
    told = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *what: told.append(what))
    return told


def test_more_than_there_is_is_refused_and_the_allocator_is_told_a_share(shares):
    with pytest.raises(ConfigError, match=r"at most 80\.0"):
        set_up(MemoryLimit(90))
    assert not shares
    set_up(MemoryLimit(60))
    assert shares == [(0.75, torch.device("cuda:0"))]
