import subprocess
import sys

import pytest


@pytest.mark.vllm
def test_registering_twice_is_registering_once():
    program = (
        "from lit_qrl.rollout.vllm.nf4 import NAME; from lit_qrl.rollout.vllm.patches.nf4_method import PATCH\n"
        "PATCH.apply((0, 32, 0))\n"
        "from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS as q, get_quantization_config as g\n"
        "before = g(NAME); PATCH.apply((0, 32, 0)); print(q.count(NAME), g(NAME) is before)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split()[-2:] == ["1", "True"]
