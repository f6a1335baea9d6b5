"""The server that a person starts."""

import io
import socket
import threading
from contextlib import redirect_stdout
from types import SimpleNamespace

import pytest

from lit_qrl.cli.main import main
from lit_qrl.cli.serve import serve
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.engine import SamplerSpec
from lit_qrl.rollout.remote.engine import RemoteEngine
from tests.networks import build_network
from tests.rollout.remote.served import publish


class Lines(io.StringIO):
    def __init__(self):
        super().__init__()
        self.there = threading.Event()

    def flush(self):
        self.there.set()


def test_it_serves_a_run_where_it_says(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as it sets itself
    (tmp_path / "token").write_text("ours\n")
    said = Lines()
    with redirect_stdout(said):
        options = {"token_file": tmp_path / "token", "port": 0, "device": "cpu", "once": True}
        thread = threading.Thread(target=serve, kwargs=options)
        thread.start()
        assert said.there.wait(30)
    place = said.getvalue().split(" at ")[1].strip().rstrip(".")
    engine = RemoteEngine(TransformersEngine(), hosts=[place], token_file=str(tmp_path / "token"))
    network = build_network()
    engine.setup(SamplerSpec(), SimpleNamespace(network=network))
    assert publish(engine, network, "fp8_row")[0] == []
    engine.close()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--token_file", "nowhere"], "nowhere: No such file"),
        (["--device", "cuda:9"], "--device is not there. Expected: cpu"),
        (["--port", "USED"], "a port that nobody uses"),
    ],
)
def test_what_cannot_be_served_is_one_paragraph(tmp_path, monkeypatch, capsys, options, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token").write_text("ours\n")
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = str(held.getsockname()[1])
        options = [port if option == "USED" else option for option in options]
        with pytest.raises(SystemExit) as ended:
            main(["serve", *([] if "--token_file" in options else ["--token_file", "token"]), *options])
    assert ended.value.code == 2
    assert named in " ".join(capsys.readouterr().err.split())
