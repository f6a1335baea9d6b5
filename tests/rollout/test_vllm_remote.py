"""Real `vllm serve` processes: every format verified there, every corruption named, every death outlived."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch

from lit_qrl.receipts.clock import Clock
from lit_qrl.rollout.engine import SamplerSpec
from lit_qrl.rollout.vllm import arguments
from lit_qrl.rollout.vllm.client import RemoteVLLMEngine
from lit_qrl.rollout.vllm.server import Server
from lit_qrl.run.event_log import read_jsonl
from lit_qrl.types import SamplingParams
from tests.cpu_kernels import skip_without_kernel
from tests.rollout import test_vllm_faults as faults
from tests.tables import csv_rows
from tests.tiny_run import build, model_folder, parameters_of
from tests.vllm_engines import (
    COMPLETION_LIMIT,
    PROMPT_LIMIT,
    one_step_behind,
    prompts,
    publish,
    sampler_format,
    tiny_network,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
CORRUPTIONS = [
    faults.test_skipped_layer,
    faults.test_dropped_k_proj_is_refused_and_the_old_weights_stay,
    faults.test_two_layers_exchanged,
    faults.test_stale_scale,
    faults.test_wrong_scale,
    faults.test_wrong_version,
    faults.test_not_finite_on_the_way,
    faults.test_not_finite_at_the_sender_is_refused_and_named,
    faults.test_wrong_dtype,
    faults.test_tensor_sent_twice,
]


@pytest.fixture(scope="module")
def emulated():
    """CPU kernels that vLLM lacks are emulated, in the servers too."""
    from tests import vllm_cpu_shim

    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            vllm_cpu_shim.install()
            patch.setattr(arguments, "EXTENSION", "tests.served_worker.WorkerExtension")
        yield


def served(network, format, **options):
    engine = RemoteVLLMEngine(max_num_seqs=32, **options)
    sampling = SamplingParams(max_tokens=COMPLETION_LIMIT, ignore_stop=True)
    spec = SamplerSpec(sampling=sampling, format=format, prompt_limit=PROMPT_LIMIT)
    engine.validate(spec)
    engine.setup(spec, SimpleNamespace(network=network))
    return engine


LATER = [pytest.param(name, marks=pytest.mark.slow) for name in ("fp8_row, staged", "int4_group", "nvfp4")]


@pytest.fixture(scope="module", params=["plain", "fp8_row", *LATER])
def held(request, emulated):
    """An engine that holds the weights of before one optimizer step, as in the tests of the one in this process."""
    format, network = sampler_format(request.param.partition(",")[0]), tiny_network()
    skip_without_kernel(format)
    engine = served(network, format)
    assert publish(network, engine, format, 0)[0] == []
    if "staged" in request.param:
        load = engine.load_weights

        def staged(*args):
            with engine.staged(lambda: None):
                return load(*args)

        engine.load_weights = staged
    yield from one_step_behind(network, engine, format)


@pytest.mark.parametrize("corruption", CORRUPTIONS, ids=lambda test: test.__name__.removeprefix("test_"))
def test_every_corruption_is_named(held, corruption, request):
    staged = "staged" in request.node.name
    if staged and corruption is faults.test_not_finite_at_the_sender_is_refused_and_named:
        corruption = refused_before_anything_was_taken
    corruption(held)


def refused_before_anything_was_taken(published):
    """An engine that none of such weights reached goes on with those that it has."""
    state = published()
    norm = state.network.get_parameter(faults.NORM).data
    kept, norm[3] = norm[3].clone(), float("inf")
    with pytest.raises(ValueError, match=faults.NORM):
        publish(state.network, state.engine, state.format, state.version)
    norm[3] = kept
    assert all(torch.isfinite(torch.as_tensor(one)).all() for one in state.engine.score(faults.prompts(1)))


@pytest.mark.parametrize("held", ["plain"], indirect=True)
def test_a_server_draws_and_scores_as_the_engine_in_this_process_does(held, built):
    state = held()
    here, there = built(state.network), state.engine
    for engine in (here, there):
        assert publish(state.network, engine, None, state.version)[0] == []
    drawn = [engine.generate(prompts(3), 2, seed=5) for engine in (here, there)]
    assert [one.token_ids for one in drawn[0]] == [one.token_ids for one in drawn[1]]
    assert {one.version for one in drawn[1]} == {state.version}
    assert torch.allclose(here.score(prompts(1))[0], there.score(prompts(1))[0], atol=1e-5)


@pytest.mark.parametrize("held", ["plain"], indirect=True)
def test_what_a_run_left_half_sent_is_given_up_when_the_next_comes(held):
    state = held()
    engine, (server,) = state.engine, state.engine.servers
    engine._ask_all("/start_weight_update")
    engine._post_part(engine._sender.pack([(faults.NORM, state.old[faults.NORM])]), state.version, Clock())
    server.open()
    assert publish(state.network, engine, None, state.version)[0] == []


IN_FLIGHT = {"schedule": "async", "max_staleness": 2, "in_flight_updates": "keep"}


@pytest.mark.slow  # deaths in a run: tests/loop/test_ahead.py
@pytest.mark.parametrize("flight", [{"schedule": "one_step_off"}, IN_FLIGHT], ids=["one_step_off", "in_flight"])
def test_a_run_draws_ahead_and_learns_from_the_log_probs_of_those_that_drew(emulated, tmp_path, flight, monkeypatch):
    model_folder(tmp_path / "model", hidden_size=128, intermediate_size=256, head_dim=32, max_position_embeddings=128)
    post, struck = Server.post, []

    def striking(one, path, *args, **query):  # in the third rollout, or about there
        if path == "/inference/v1/generate" and one.version == 2 and not struck and "in_flight_updates" not in flight:
            struck.append(one)
            os.killpg(one._process.pid, signal.SIGKILL)
        return post(one, path, *args, **query)

    monkeypatch.setattr(Server, "post", striking)
    trainer, module, data = build(
        tmp_path,
        engine=RemoteVLLMEngine(max_num_seqs=8, dtype="fp32"),
        data={**flight, "max_completion_tokens": 56},
        trainer={"max_epochs": 5},
        publisher={"probe_every": 1},
        format="fp32",
        lr=0.0,
    )
    trainer.fit(module, datamodule=data)
    apart = [
        float(row["mismatch/kl_k3"]) for row in csv_rows(tmp_path / "run" / "metrics.csv") if row.get("mismatch/kl_k3")
    ]
    assert len(apart) == 5
    assert max(apart) < 1e-7
    deaths = [one for one in read_jsonl(tmp_path / "run" / "events.jsonl") if one["kind"] == "engine_died"]
    assert len(deaths) == len(struck)
    assert parameters_of(module).isfinite().all()
