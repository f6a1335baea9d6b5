"""vLLM in a process of its own: every format verified there, every corruption named, every death outlived."""

import csv
import sys
from types import SimpleNamespace

import pytest
import torch

from lit_qrl.loop.schedule import RolloutPrefetcher
from lit_qrl.rollout.engine import SamplerSpec
from lit_qrl.rollout.remote import replica
from lit_qrl.rollout.remote.engine import RemoteVLLMEngine
from lit_qrl.rollout.remote.replica import Replica
from lit_qrl.run.event_log import read_jsonl
from lit_qrl.types import SamplingParams
from tests.cpu_kernels import skip_without_kernel
from tests.rollout import test_vllm_faults as faults
from tests.tiny_run import build, model_folder, parameters_of
from tests.vllm_engines import (
    COMPLETION_LIMIT,
    PROMPT_LIMIT,
    one_step_behind,
    publish,
    sampler_format,
    tiny_network,
)

pytestmark = pytest.mark.vllm

# CPU kernels that vLLM lacks are emulated, in that process too.
SERVER = (
    "from tests import vllm_cpu_shim; vllm_cpu_shim.install(); from lit_qrl.rollout.remote import server; server.main()"
)
# Steps that take longer than an update, so that weights come in the middle of a draw on any host.
SLOW = "import time; from vllm.v1.engine.llm_engine import LLMEngine as E; s = E.step; " + (
    f"E.step = lambda self: (time.sleep(0.05), s(self))[1]; {SERVER}"
)
CORRUPTIONS = [
    faults.test_skipped_layer,
    faults.test_dropped_k_proj_is_refused_and_the_old_weights_stay,
    faults.test_two_layers_exchanged,
    faults.test_stale_scale,
    faults.test_wrong_scale,
    faults.test_wrong_version,
    faults.test_not_finite_on_the_way,
    faults.test_not_finite_at_the_sender_is_refused_and_named,
    faults.test_transposed_block,
    faults.test_old_norms,
    faults.test_wrong_dtype,
    faults.test_tensor_sent_twice,
]


@pytest.fixture(scope="module")
def served():
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(replica, "COMMAND", (sys.executable, "-c", SERVER))
        yield


@pytest.fixture(scope="module", params=["plain", "fp8_row", "fp8_row, staged", "int4_group", "nvfp4"])
def held(request, served):
    """An engine that holds the weights of before one optimizer step, as in the tests of the one in this process."""
    format, network = sampler_format(request.param.partition(",")[0]), tiny_network()
    skip_without_kernel(format)
    engine = RemoteVLLMEngine(max_num_seqs=32)
    sampling = SamplingParams(max_tokens=COMPLETION_LIMIT, ignore_stop=True)
    spec = SamplerSpec(sampling=sampling, format=format, prompt_limit=PROMPT_LIMIT)
    engine.validate(spec)
    engine.setup(spec, SimpleNamespace(network=network))
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


class Killing:
    """Kills the process of a replica once, as soon as it was asked for `what` with the weights of a version."""

    def __init__(self, what, version):
        self.what, self.version, self.killed = what, version, []

    def install(self, monkeypatch, engine):
        begin, stage = Replica.begin, Replica.stage_chunk

        def killed(one, what, *args):
            begin(one, what, *args)
            at = args[-1] if what in ("load_weights", "take") else engine.version
            kill(one, what, at)

        def killed_meanwhile(one, *args):
            stage(one, *args)
            kill(one, "stage", one._staging)

        def kill(one, what, at):
            if (what, at) == (self.what, self.version) and not self.killed:
                self.killed.append(one._process.pid)
                one._process.kill()

        monkeypatch.setattr(Replica, "begin", killed)
        monkeypatch.setattr(Replica, "stage_chunk", killed_meanwhile)


@pytest.fixture(scope="module")
def run(served, tmp_path_factory):
    """Make a run, and return its weights, its versions and its deaths."""

    def make(monkeypatch=None, killing=None, data=None):
        folder = tmp_path_factory.mktemp("run")
        model_folder(folder / "model", hidden_size=128, intermediate_size=256, head_dim=32)
        engine = RemoteVLLMEngine(max_num_seqs=16)
        if killing is not None:
            killing.install(monkeypatch, engine)
        options = {"trainer": {"max_epochs": 3}, "publisher": {"probe_every": 0}, "data": data}
        trainer, module, data = build(folder, engine=engine, **options)
        trainer.fit(module, datamodule=data)
        deaths = [one for one in read_jsonl(folder / "run" / "events.jsonl") if one["kind"] == "engine_died"]
        return parameters_of(module), deaths

    return make


@pytest.fixture(scope="module")
def undisturbed(run):
    return run()[0]


def test_a_run_whose_weights_come_in_flight_learns_from_the_log_probs_of_those_that_drew(served, tmp_path):
    model_folder(tmp_path / "model", hidden_size=128, intermediate_size=256, head_dim=32, max_position_embeddings=128)
    flight = {"schedule": "async", "max_staleness": 2, "in_flight_updates": "keep", "max_completion_tokens": 56}
    trainer, module, data = build(
        tmp_path,
        engine=RemoteVLLMEngine(max_num_seqs=8, dtype="fp32"),
        data=flight,
        trainer={"max_epochs": 5},
        publisher={"probe_every": 1},  # which asks an engine that stands still
        format="fp32",
        lr=0.0,
    )
    trainer.fit(module, datamodule=data)
    with (tmp_path / "run" / "metrics.csv").open() as file:
        apart = [float(row["mismatch/kl_k3"]) for row in csv.DictReader(file) if row.get("mismatch/kl_k3")]
    assert len(apart) == 5
    assert max(apart) < 1e-7
    ages = data.schedule.tokens_of_age
    assert set(ages) <= {0, 1, 2}
    assert ages.keys() - {0}


@pytest.mark.parametrize("what", ["generate", "load_weights"])
def test_a_server_that_is_killed_is_replaced_and_the_run_is_the_same(run, undisturbed, monkeypatch, what):
    killing = Killing(what, version=1)
    weights, deaths = run(monkeypatch, killing)
    assert len(killing.killed) == 1
    assert len(deaths) == 1
    assert "ended with status -9" in deaths[0]["message"]
    assert torch.equal(weights, undisturbed)


ONE_OFF = {"schedule": "one_step_off"}


@pytest.fixture(scope="module")
def one_off(run):
    """The weights of a run that never sends any while its engine draws."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutPrefetcher, "drawing", False)
        return run(data=ONE_OFF)[0]


def test_a_run_whose_weights_come_while_vllm_draws_is_the_same_run(run, one_off, monkeypatch):
    staged = []
    take = Replica.begin_taking
    monkeypatch.setattr(Replica, "begin_taking", lambda one, *args: (staged.append(args[0]), take(one, *args)))
    monkeypatch.setattr(RolloutPrefetcher, "drawing", True)
    assert torch.equal(run(data=ONE_OFF)[0], one_off)
    assert len(staged) == 2
    assert min(staged) > 0


@pytest.mark.parametrize("what", ["stage", "take"])
def test_a_server_that_is_killed_with_weights_on_their_way_is_replaced(run, one_off, monkeypatch, what):
    monkeypatch.setattr(RolloutPrefetcher, "drawing", property(lambda ahead: bool(ahead._futures)))
    killing = Killing(what, version=1)
    weights, deaths = run(monkeypatch, killing, data=ONE_OFF)
    assert len(killing.killed) == len(deaths) == 1
    assert "ended with status -9" in deaths[0]["message"]
    assert weights.shape == one_off.shape
    assert weights.isfinite().all()
