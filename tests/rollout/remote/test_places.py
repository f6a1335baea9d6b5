"""Where engines are put, and what is refused."""

import pytest
import torch

from lit_qrl.errors import ConfigError
from lit_qrl.rollout.engine import Learners
from lit_qrl.rollout.remote.places import places
from lit_qrl.rollout.remote.replica import Place


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def test_auto_takes_the_gpus_that_the_learner_leaves(gpus):
    found = places("auto", None, None, Learners(devices=(0, 1)))
    assert [place.name for place in found] == ["cuda:2", "cuda:3"]
    assert [place.name for place in places("auto", None, None, Learners())] == ["cpu"]


def test_each_process_of_the_learner_has_its_own(gpus):
    shares = [places([1, 2, 3], None, None, Learners(devices=(0,), local=(rank, 2))) for rank in range(2)]
    assert [[place.name for place in share] for share in shares] == [["cuda:1", "cuda:3"], ["cuda:2"]]
    on_cpus = [places("auto", None, None, Learners(local=(rank, 2))) for rank in range(2)]
    assert [[place.name for place in share] for share in on_cpus] == [["cpu"], ["cpu"]]
    with pytest.raises(ConfigError, match="fewer engines than the learner has processes"):
        places([3], None, None, Learners(devices=(0, 1), local=(0, 2)))


def test_a_gpu_of_the_learner_is_refused(gpus):
    with pytest.raises(ConfigError, match="share a GPU with the learner"):
        places([0, 1], None, None, Learners(devices=(0,)))
    with pytest.raises(ConfigError, match="No GPU is left"):
        places("auto", None, None, Learners(devices=(0, 1, 2, 3)))


@pytest.mark.parametrize("devices", [["gpu"], [7], [], [-1]])
def test_what_is_not_there_is_named(gpus, devices):
    with pytest.raises(ConfigError, match="names what is not there"):
        places(devices, None, None, Learners())


def test_servers_need_a_port_and_a_token(tmp_path):
    (tmp_path / "token").write_text("t")
    assert places("auto", ["node1:80"], str(tmp_path / "token"), Learners()) == [Place("node1:80", b"t")]
    with pytest.raises(ConfigError, match="malformed"):
        places("auto", ["node1"], str(tmp_path / "token"), Learners())
    with pytest.raises(ConfigError, match="needs the servers' token"):
        places("auto", ["node1:80"], None, Learners())
