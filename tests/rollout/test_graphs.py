import pytest
import torch

from lit_qrl.rollout.graphs import record


@pytest.mark.gpu
def test_a_graph_repeats_its_work_on_what_stands_there_then():
    device = torch.device("cuda")
    x, y = torch.ones(1000, device=device), torch.zeros(1000, device=device)
    graph = record(lambda: y.add_((x * 2).square()), device)
    assert float(y.sum()) == 0
    graph.replay()
    x.fill_(3)
    graph.replay()
    assert y.unique().tolist() == [4 + 36]
    later = record(lambda: y.copy_(x * 5), device, graph)
    later.replay()
    assert y.unique().tolist() == [15]


@pytest.mark.gpu
def test_what_fails_while_it_is_recorded_is_raised_and_the_device_goes_on():
    device = torch.device("cuda")
    x = torch.ones(10, device=device)

    def refused():
        torch.empty(2**50, dtype=torch.uint8, device=device)

    with pytest.raises(torch.OutOfMemoryError):
        record(refused, device)
    graph = record(lambda: x.mul_(2), device)
    graph.replay()
    assert float(x.sum()) == 20
