"""Which engines stand still while another thread gives them weights."""

from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.pauses import Pauses, Stand
from lit_qrl.rollout.remote.engine import RemoteEngine


def test_engines_in_other_processes_do():
    assert isinstance(RemoteEngine(TransformersEngine()), Pauses)
    assert not isinstance(TransformersEngine(), Pauses)


def test_an_engine_stands_before_its_first_rollout():
    assert Stand() == (None, None)
