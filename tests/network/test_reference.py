from torch import nn

from lit_qrl.network.reference import Reference


def test_a_reference_scores_with_its_own_network_inside_its_own_call():
    network = nn.Linear(1, 1)
    reference, seen = Reference(network), []
    reference.register_forward_pre_hook(lambda module, arguments: seen.append("before"))
    assert reference(lambda *given: given, 1, 2) == (network, 1, 2)
    assert seen == ["before"]
