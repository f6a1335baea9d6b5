"""An engine with experts and an adapter: tests/rollout/test_vllm_experts.py."""

from dataclasses import dataclass

from lit_qrl.rollout.vllm.patches.unadapted_experts import PATCH


def test_experts_have_no_adapter_and_what_else_the_config_does_stays():
    @dataclass
    class Config:
        is_lora_enabled: bool = True
        size: int = 0

        def __post_init__(self):
            self.size = 3

    (changed,) = PATCH.changes.values()
    Config.__post_init__ = changed(Config.__post_init__)
    made = Config()
    assert (made.is_lora_enabled, made.size) == (False, 3)


def test_it_is_for_both_devices():
    assert PATCH.concerns((0, 26, 0), "cuda")
    assert PATCH.concerns((0, 32, 0), "cpu")
