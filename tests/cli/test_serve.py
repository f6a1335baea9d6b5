"""The server that a person starts; that one takes weights and draws: tests/rollout/test_vllm_remote.py."""

import shlex
import socket
from itertools import pairwise

import pytest

from lit_qrl.cli.main import main
from tests.command_line import status_of
from tests.tiny_run import model_folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token").write_text("ours\n")
    model_folder(tmp_path / "model", head_dim=64)
    return tmp_path


@pytest.mark.vllm
def test_it_shows_the_line_that_starts_vllms_own_server(here, capsys):
    main(["serve", "model", "--token_file", "token", "--format", "fp8_row", "--max_model_len", "64", "--show", "true"])
    words = shlex.split(capsys.readouterr().out)
    assert "ours" not in " ".join(words)  # the key stays in its file
    assert {"VLLM_API_KEY", "VLLM_SERVER_DEV_MODE"} <= {one.split("=")[0] for one in words}
    given = dict(pairwise(words))
    assert given["--worker-extension-cls"] == "lit_qrl.rollout.vllm.worker.WorkerExtension"
    assert given["--weight-transfer-config"] == '{"backend": "lit_qrl"}'
    assert given["--middleware"] == "lit_qrl.rollout.vllm.guard.KeyGuard"
    assert (given["--max-model-len"], given["--logprobs-mode"]) == ("65", "processed_logprobs")
    assert {"--tokens-only", "--skip-tokenizer-init"} <= set(words)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--token_file", "nowhere"], "nowhere: No such file"),
        (["--device", "cuda:9"], "--device is not there. Expected: cpu"),
        (["--port", "USED"], "a port that nobody uses"),
    ],
)
def test_what_cannot_be_served_is_one_paragraph(here, capsys, options, named):
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = str(held.getsockname()[1])
        options = [port if option == "USED" else option for option in options]
        status = status_of(["serve", "model", "--token_file", "token", *options])
    assert status == 2
    assert named in " ".join(capsys.readouterr().err.split())
