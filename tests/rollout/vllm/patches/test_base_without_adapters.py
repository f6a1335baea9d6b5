import torch

from lit_qrl.rollout.vllm.patches.base_without_adapters import without_adapters


def test_lora_wrappers_are_out_of_the_way_inside_and_back_after():
    class LinearWithLoRA(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer = torch.nn.Linear(2, 2)
            self.lora_a_stacked = ()

    model = torch.nn.Sequential(LinearWithLoRA(), torch.nn.Linear(2, 2))
    wrapper = model[0]
    with without_adapters(model):
        assert model[0] is wrapper.base_layer
        assert {name for name, _ in model.named_parameters()} == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert model[0] is wrapper
