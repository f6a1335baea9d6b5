"""Which engines stand still while another thread gives them weights."""

from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.pauses import Pauses
from lit_qrl.rollout.vllm.client import RemoteVLLMEngine


def test_engines_in_other_processes_do():
    assert isinstance(RemoteVLLMEngine(), Pauses)
    assert not isinstance(TransformersEngine(), Pauses)
