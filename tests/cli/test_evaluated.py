import torch

from lit_qrl.cli.training import told


def test_an_accuracy_is_told_once_with_its_interval():
    lines = told(
        {
            "val/greedy_pass@1": torch.tensor(0.34765625),
            "val/greedy_pass@1_ci_low": torch.tensor(0.29),
            "val/greedy_pass@1_ci_high": torch.tensor(0.4081),
            "val/pass@1": torch.tensor(0.34765625),  # its former name
            "val/gsm8k/avg@4": 0.5,
        }
    )
    assert lines == ["val/greedy_pass@1  0.348  [0.290, 0.408]", "val/gsm8k/avg@4    0.500"]
    assert told({}) == []
