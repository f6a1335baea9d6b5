"""Changes to vLLM's code: their machinery on a module that stands in for vLLM's, and each change by itself."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel

from lit_qrl.errors import ConfigError
from lit_qrl.rollout.vllm import installation, patches
from lit_qrl.rollout.vllm.installation import installed_version
from lit_qrl.rollout.vllm.patches import CUMEM, DUMMY, PATCHES, Patch, apply, apply_all, fill, find
from lit_qrl.types import SamplingParams
from tests.families.configs import BY_TYPE, random_network
from tests.families.vllm_cells import eager_network, start
from tests.families.vllm_cells import publish as publish_cell
from tests.vllm_engines import prompts, publish, sampler_format, tiny_network

BY_NAME = {patch.name: patch for patch in PATCHES}


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({}, [(0, 26, 0), (0, 32, 1), (1, 0, 0)], []),
        ({"fixed": "0.32"}, [(0, 26, 0), (0, 31, 9)], [(0, 32, 0), (0, 33, 0)]),
        ({"fixed": "0.27.2"}, [(0, 26, 1), (0, 27, 1)], [(0, 27, 2)]),
        ({"since": "0.40"}, [(0, 40, 0), (1, 0, 0)], [(0, 26, 0), (0, 39, 9)]),
    ],
)
def test_versions(bounds, inside, outside):
    one = patch("count", **bounds)
    assert all(one.concerns(version, "cpu") for version in inside)
    assert not any(one.concerns(version, "cpu") for version in outside)


class Engine:
    kind = "engine"

    def __init__(self):
        self.pool = None

    def step(self):
        self.finished = self.kind


def test_what_an_init_or_a_function_sets_is_there(fake):
    fake("vllm.part", Engine=Engine, number=3)
    for symbol in ("number", "Engine.kind", "Engine.pool", "Engine.step.finished"):
        find(f"vllm.part:{symbol}")
    for symbol in ("other", "Engine.other", "Engine.finished", "Engine.step.other"):
        with pytest.raises(AttributeError, match="has no"):
            find(f"vllm.part:{symbol}")


def patch(symbol, name="one_more", **options):
    changes = {f"vllm.part:{symbol}": lambda original: lambda: original() + 1}
    return Patch(name, "numbers are wrong", "by looking", changes, **options)


def test_a_change_is_made_once_however_often_it_is_applied(fake):
    module = fake("vllm.part", count=lambda: 1)
    for _ in range(3):
        apply(patch("count"), (0, 32, 0))
    assert module.count() == 2


@pytest.mark.parametrize(
    ("symbol", "needs", "named"),
    [
        ("renamed", (), r"vllm\.part\.renamed is not there.*vllm\.part has no renamed"),
        ("count", ("vllm.part:Engine.lost",), r"vllm\.part\.Engine\.lost is not there.*Engine has no lost"),
        ("count", ("vllm_of_another_layout.part:x",), "No module named 'vllm_of_another_layout'"),
        ("given", (), r"vllm\.part\.given takes other arguments \(more\)"),
    ],
)
def test_what_is_gone_is_an_error_that_names_patch_symbol_and_version_and_nothing_is_changed(
    symbol, needs, named, fake
):
    module = fake("vllm.part", count=lambda: 1, given=lambda more: 1, Engine=Engine)
    with pytest.raises(
        ConfigError, match=rf"patch one_more does not fit.*{named}.*numbers are wrong.*Given: vLLM 0\.33\.1"
    ):
        apply(patch(symbol, needs=needs), (0, 33, 1))
    assert module.count() == 1


def test_those_are_made_that_the_installed_version_needs(fake, install, monkeypatch):
    made = []
    module = fake("vllm.part", count=lambda: 1)
    mine = (patch("count"), patch("gone", "mended", fixed="0.32"), patch("gone", "of_a_gpu", device="cuda"))
    monkeypatch.setattr(patches, "PATCHES", mine)
    monkeypatch.setattr(installation, "check_plugin", made.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    install("0.33.0", cpu=True)
    apply_all()
    assert module.count() == 2
    assert made == ["cpu"]


@pytest.mark.vllm
def test_what_the_patches_need_is_in_the_installed_vllm():
    version, _ = installed_version()
    for one in PATCHES:
        if one.concerns(version, one.device or "cpu"):
            assert one.misfit() is None, one.name


class Sampler:
    """Gathers as vLLM's does."""

    @staticmethod
    def gather_logprobs(logprobs, num_logprobs, token_ids):
        return logprobs.topk(num_logprobs, dim=-1).values, token_ids


def test_all_log_probs_are_those_of_the_words_that_were_left(fake):
    class Flat:
        def __init__(self):
            self.start_indices = []

    kind = type("Sampler", (Sampler,), {"gather_logprobs": staticmethod(Sampler.gather_logprobs)})
    for name in ("vllm", "vllm.v1", "vllm.v1.sample"):
        fake(name)
    fake("vllm.v1.sample.sampler", Sampler=kind)
    fake("vllm.logprobs", FlatLogprobs=Flat)
    made = []
    for _ in range(2):
        BY_NAME["kept_tokens"].make()
        made.append(kind.gather_logprobs)
    assert made[0] is made[1]
    logprobs = torch.tensor([[-1.0, -math.inf, -0.5, -math.inf], [-math.inf, 0.0, -math.inf, -math.inf]])
    gather = SimpleNamespace(sampler=kind()).sampler.gather_logprobs  # through an instance, as vLLM calls it
    found, _ = gather(logprobs, 4, None)
    assert found.tolist() == [[-0.5, -1.0], [0.0, -math.inf]]
    assert gather(logprobs, 1, None)[0].tolist() == [[-0.5], [0.0]]  # who asks for the likeliest alone
    assert gather(logprobs, 0, None)[0].shape == (2, 0)
    assert gather(logprobs[:0], 4, None)[0].shape == (0, 1)  # a step in which nothing is drawn


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.parametrize("truncation", [{"top_p": 0.8}, {"top_k": 7}, {"top_p": 0.8, "top_k": 50, "temperature": 1.3}])
def test_on_a_gpu_log_probs_are_those_over_the_kept_tokens(truncation, margin, built):
    network = tiny_network().cuda().bfloat16()
    sampling = SamplingParams(max_tokens=16, ignore_stop=True, **truncation)
    spec = {"kept": True, "sampling": sampling}
    engine = built(network, spec=spec, quick_start=True, gpu_memory_utilization=0.05)
    asked, furthest = prompts(6, 60), 0.0
    publish(network, engine, None, 0)
    for prompt, one in zip(asked, engine.generate(asked, 1, seed=3), strict=True):
        with torch.no_grad():
            logits = network(input_ids=torch.tensor([[*prompt, *one.token_ids]]).cuda()).logits[0, :-1].float()
        scores = (logits[len(prompt) - 1 :] / sampling.temperature).cpu()
        for step, (token, logprob, kept) in enumerate(zip(one.token_ids, one.logprobs, one.kept, strict=True)):
            assert token in kept.tolist()
            assert 1 <= len(kept) < 512  # of `top_k` there may be more: logits in bf16 tie, and all of them are kept
            own = scores[step][token] - scores[step][kept.long()].logsumexp(0)
            furthest = max(furthest, abs(float(own) - logprob))
    assert furthest < 0.1
    assert engine.generate(asked[:2], 1, seed=3, sampling=SamplingParams(max_tokens=4, temperature=0))[0].kept is None
    assert len(engine.score(asked[:2])) == 2
    margin(f"kept through vLLM on a GPU ({truncation}), |log-ratio| at most", f"{furthest:.1e}")


def test_attention_is_in_one_piece_for_an_engine_that_computes_as_the_learner_does(monkeypatch):
    plan = SimpleNamespace(max_num_splits=4, scheduler_metadata=2, max_query_len=1)
    build = patches.in_one_piece(lambda: plan)
    assert (build().max_num_splits, plan.max_query_len) == (4, 1)
    monkeypatch.setattr(patches.same_kernels, "_active", True)
    assert (build().max_num_splits, plan.scheduler_metadata, plan.max_query_len) == (1, None, 65)
    plan.max_query_len = 300
    assert build().max_query_len == 300


def test_rotary_frequencies_are_computed_on_the_cpu():
    seen = []

    def frequencies(base):
        seen.append(torch.zeros(1).device.type)
        return 1 / base ** torch.arange(0, 1, 0.5)

    with torch.device("meta"):
        found = patches.on_the_cpu(frequencies)(4.0)
    assert (seen, found.device.type) == (["cpu"], "meta")


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu],
)
def test_numbers_are_exact(dtype):
    tensor = torch.zeros(3, 2, dtype=dtype)
    fill(tensor, -1e-3, 1e-3, seed=1)
    assert tensor.float().unique().tolist() == [DUMMY]


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["plain", "nvfp4", "fp8_row"])
def test_an_engine_starts_with_finite_weights_and_logits(name, built):
    format = sampler_format(name)
    engine = built(tiny_network(), format)
    engine._start(format)
    weights = dict(engine.live.model.named_parameters())
    assert all(weight.float().isfinite().all() for weight in weights.values())
    embedding = next(weight for key, weight in weights.items() if "embed_tokens" in key)
    assert set(embedding.unique().tolist()) <= {0.0, DUMMY}  # vLLM's padding is 0
    engine._usable = True
    scores = engine.score([[5, 6, 7]])
    assert scores[0].isfinite().all()


@pytest.mark.vllm
def test_the_learner_computes_as_before_after_vllm_took_its_class():
    network, ids = eager_network(BY_TYPE["olmo2"], 0), torch.arange(2, 12)[None]
    with torch.no_grad():
        expected = network(input_ids=ids, use_cache=False).logits
    engine = start(network, None)
    try:
        publish_cell(network, engine, 0)
        theirs = [one for one in engine.live.model.modules() if isinstance(one, PreTrainedModel)]
        assert type(network.model) in {type(one) for one in theirs}
        with torch.no_grad():
            assert torch.equal(network(input_ids=ids, use_cache=False).logits, expected)
            later = random_network(BY_TYPE["olmo2"])  # built when the class was changed
            later.set_attn_implementation("eager")
            assert torch.equal(later(input_ids=ids, use_cache=False).logits, expected)
    finally:
        engine.close()


def test_layers_share_marlins_lock_memory_over_reloads(fake, monkeypatch):
    monkeypatch.setattr(patches, "workspaces", {})

    def make(device, max_blocks_per_sm=1):
        return torch.zeros(4 * max_blocks_per_sm, dtype=torch.int)

    one = BY_NAME["marlin_workspaces"]
    modules = [fake(symbol.partition(":")[0], marlin_make_workspace_new=make) for symbol in one.changes]
    for _ in range(2):
        one.make()
    device = torch.device("cpu")
    first = modules[0].marlin_make_workspace_new(device, 2)
    assert first.shape == (8,)
    assert all(other.marlin_make_workspace_new(device, 2) is first for other in modules)
    assert modules[0].marlin_make_workspace_new(device) is not first


def test_what_packing_released_is_none_again_and_the_rest_is_left(fake):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].quant_method = object()
    restored = SimpleNamespace(restore_metadata=({"weight": 0, "g_idx": 0}, {"lut": 0}))
    fake("vllm.model_executor.model_loader.reload.layerwise", get_layerwise_info=lambda module: restored)
    weight = model[0].weight
    patches.declare(model)
    assert model[0].weight is weight
    assert model[0].g_idx is model[0].lut is None
    with pytest.raises(AttributeError):
        _ = model[1].g_idx  # no method asks for it


class Allocator:
    def __init__(self):
        self.pointer_to_data, self.story = {}, []
        self.python_free_callback = self._python_free_callback

    def _python_free_callback(self, pointer):
        self.story.append(("unmap", pointer))
        return self.pointer_to_data.pop(pointer).handle


def test_what_slept_is_mapped_for_the_moment_in_which_it_is_freed(fake):
    mapped = []
    data = SimpleNamespace(is_asleep=False)
    fake(CUMEM, CuMemAllocator=Allocator, AllocationData=data, create_and_map=mapped.append)
    for _ in range(2):  # a second engine
        BY_NAME["sleeping_memory"].make()
    allocator = Allocator()
    for pointer, asleep in ((1, True), (2, False)):
        allocator.pointer_to_data[pointer] = SimpleNamespace(handle=f"handle {pointer}", is_asleep=asleep)
    assert allocator.python_free_callback(1) == "handle 1"
    assert mapped == ["handle 1"]
    assert allocator.python_free_callback(2) == "handle 2"
    assert mapped == ["handle 1"]
    assert allocator.story == [("unmap", 1), ("unmap", 2)]
    assert not allocator.pointer_to_data


def test_experts_have_no_adapter_and_what_else_the_config_does_stays():
    made = SimpleNamespace(is_lora_enabled=True)
    patches.without_adapter(lambda config: setattr(config, "size", 3))(made)
    assert (made.is_lora_enabled, made.size) == (False, 3)
