"""What a loader of vLLM computes; a latent attention, whose pieces are made of a layer: tests/families."""

import torch
from torch import nn

from lit_qrl.rollout.vllm import live_model
from lit_qrl.rollout.vllm.locations import Place


def test_what_a_loader_computed_is_held_to_what_was_sent():
    def composed_weight_loader():
        def composed_loader(parameter, loaded):
            parameter.data.copy_(-torch.exp(loaded))

        return composed_loader

    mixer = nn.Module()
    mixer.A, mixer.D = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    mixer.A.weight_loader = composed_weight_loader()
    logarithm = torch.tensor([0.0, 1.0, 2.0])
    assert live_model.computing_loader(mixer.D) is None
    for held, named in ((-logarithm.exp(), []), (-(logarithm + 4e-5).exp(), ["mixer.A_log"])):
        sent = {"mixer.A_log": (Place("mixer", mixer, "A", rewritten=True), logarithm)}
        mixer.A.data.copy_(held)
        assert [fault.name for fault in live_model.wrongly_computed(sent)] == named
        assert sent == {}
