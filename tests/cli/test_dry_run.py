import json
import re
import shlex
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from lit_qrl import formats
from lit_qrl.cli import dry_run as dry
from lit_qrl.errors import ConfigError
from lit_qrl.quantize import quantize_checkpoint
from lit_qrl.rollout import TransformersEngine, VLLMEngine
from lit_qrl.rollout.engine import SamplerSpec
from lit_qrl.strategies.colocated import ColocatedStrategy
from lit_qrl.strategies.peers import Peers
from tests.command_line import build_once, status_of
from tests.tiny_run import configured

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
MODEL = ROOT / "models" / "tiny-countdown"
SEEN = ("callbacks", "precision_plugin", "strategy")
LORA = "--model.policy.lora peft.LoraConfig"
SHARDED = f"--config {CONFIGS / 'strategy' / 'sharded.yaml'} --trainer.devices 1"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return (status, memory in bytes by part, everything printed) of `fit --dry_run`; loading weights fails."""
    monkeypatch.chdir(tmp_path)
    build_once(monkeypatch)
    tables = []
    as_table = dry.as_table

    def seen(table):
        tables.append({part.name: part.size for part in table})
        return as_table(table)

    def loaded(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(dry, "as_table", seen)
    load = AutoModelForCausalLM.from_pretrained

    def run(*args, quickstart="quickstart", dry=True):
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loaded if dry else load)
        config = f"--config {CONFIGS / quickstart}.yaml --data.task.train_size 32 {'--dry_run' if dry else ''}"
        status = status_of(["fit", *shlex.split(" ".join((config, *args)))])
        printed = capsys.readouterr()
        return status, tables[-1] if tables else {}, " ".join((printed.out + printed.err).split())

    yield run
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_it_prints_memory_and_prompts_and_leaves_nothing(run, monkeypatch):
    status, sizes, text = run()
    assert status == 0
    assert "987,776 of 987,776 parameters are trained." in text
    assert text.count("Prompt of 1") == 3
    assert "Nothing was loaded." in text
    assert not list(Path().iterdir())

    monkeypatch.undo()
    policy = configured(MODEL)
    count = sum(one.numel() for one in policy.parameters())
    config = policy.config
    assert sizes["weights"] == sizes["gradients"] == 4 * count
    assert sizes["optimizer states"] == 8 * count  # AdamW's two moments
    assert sizes["adapters"] == sizes["master bits"] == sizes["reference"] == 0
    # 32 × 8 sequences of 16 + 16 tokens; keys and values in fp32
    each = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert sizes["KV cache"] == 256 * 32 * each
    assert sizes["logits"] == 2 * 256 * 16 * config.vocab_size * 4


def test_an_adapter_in_16_bits_and_another_optimizer(run):
    sgd = "--model.optimizer torch.optim.SGD --model.optimizer.momentum 0"
    _, sizes, text = run(LORA, sgd, "--trainer.precision bf16-true --publisher.format auto")
    trained = int(re.findall(r"([\d,]+) of [\d,]+ parameters", text)[0].replace(",", ""))
    assert sizes["adapters"] == sizes["gradients"] == 4 * trained  # docs/numerics.md, "Adapters"
    assert sizes["master bits"] == 0
    assert sizes["weights"] == 2 * 987_776
    assert sizes["optimizer states"] == 0
    assert sizes["sampler's weights"] == 0  # the learner's own tensors


def test_under_autocast_the_sampler_casts_its_linear_layers_and_caches_in_its_dtype(run, monkeypatch):
    _, plain, _ = run("--publisher.format auto")
    _, mixed, _ = run("--publisher.format auto --trainer.precision bf16-mixed")
    monkeypatch.undo()
    policy = configured(MODEL)
    linear = [one.weight.numel() for one in policy.modules() if isinstance(one, torch.nn.Linear)]
    assert mixed["cast weights"] == 2 * sum(linear)
    assert mixed["KV cache"] == plain["KV cache"] / 2
    assert "cast weights" not in plain


def test_of_a_learner_in_parts_each_process_has_its_share_and_the_codes_of_a_packed_base(run, monkeypatch):
    found, parts = {}, dry.parts

    def of_two(trainer, *rest):
        for packed_base in ("replicated", "sharded"):
            trainer.strategy.packed_base = packed_base
            seen = SimpleNamespace(**{name: getattr(trainer, name) for name in SEEN}, world_size=2)
            found[packed_base] = {part.name: part.size for part in parts(seen, *rest)}
        return parts(trainer, *rest)

    monkeypatch.setattr(dry, "parts", of_two)
    _, whole, text = run(SHARDED, LORA, plugin("NVFP4LoRA"))
    assert "1 of 1 parts" in text, text
    assert found["sharded"]["weights"] == whole["weights"] / 2
    assert found["sharded"]["gradients"] == found["replicated"]["gradients"] == whole["gradients"] / 2
    codes = 2 * (found["replicated"]["weights"] - found["sharded"]["weights"])
    assert codes * 8 / 4.5 * 4 + (whole["weights"] - codes) == pytest.approx(4 * 987_776)


def plugin(name, **options):
    made = json.dumps([{"class_path": name, "init_args": options}])
    return f"--trainer.plugins '{made}' --publisher.format auto"


NOISE = json.dumps([{"class_path": "AQNNoise", "init_args": {"norms": ["*.nothing"], "num_stages": 2}}])
ONE_CYCLE = "torch.optim.lr_scheduler.OneCycleLR"
REFUSED = [
    "--data.group_size 1",
    "--data.max_prompt_tokens 2",
    "--publisher.format int4_group:group_size=40",  # fits no layer
    "--publisher.exclude '[\"*\"]'",
    "--publisher.quantize_head true",
    plugin("QATAligned", weights="int4_group:group_size=40"),
    plugin("QATAligned", weights="fp8_row", exclude=["*"]),
    plugin("QATAligned", weights="int4_group:group_size=32", kernel="marlin"),
    f"{LORA} {plugin('NVFP4LoRA', format='int4_group:group_size=40')}",
    f"{LORA} --model.policy.lora.target_modules [nothing]",
    f"{LORA} --model.policy.lora.modules_to_save [lm_head]",  # which unties the embeddings
    f"--trainer.callbacks '{NOISE}'",
    "--model.lr_scheduler torch.optim.lr_scheduler.ReduceLROnPlateau",
    f"--model.lr_scheduler {ONE_CYCLE} --model.lr_scheduler.max_lr 0.1 --model.lr_scheduler.total_steps 3",
    f"{SHARDED} --trainer.precision bf16-true",
    "--trainer.strategy ColocatedStrategy",  # whose engine would not sleep
    "--trainer.max_epochs -1",
]


@pytest.mark.parametrize("given", REFUSED)
def test_what_fit_refuses_is_refused_in_the_same_words(run, given):
    told = [run(given, dry=dry) for dry in (True, False)]
    assert [status for status, _, _ in told] == [2, 2], told
    dry, fit = (text[text.index("lit-qrl: ") :] for _, _, text in told)
    assert dry == fit


@pytest.mark.parametrize("check", ["validate", "check_model"])
def test_what_the_engine_refuses_comes_after_the_memory_of_learner_and_sampler(run, monkeypatch, check):
    def refuse(*given):
        raise ConfigError("This host is no good.")

    monkeypatch.setattr(VLLMEngine, "validate", lambda self, spec: None)
    monkeypatch.setattr(VLLMEngine, "check_model", lambda self, network: None)
    monkeypatch.setattr(VLLMEngine, check, refuse)
    for format, bits in (("int4_group", 4.5), ("fp8_row", 8)):
        status, sizes, text = run(f"--data.engine VLLMEngine --publisher.format {format}")
        assert status == 2
        assert text.endswith("lit-qrl: This host is no good.")
        assert "Nothing was loaded" not in text
        assert sizes["gradients"] == 4 * 987_776
        assert sizes["sampler's weights"] < 4 * 987_776 / 32 * bits + 2**20
    _, _, text = run("--data.engine VLLMEngine --data.group_size 1")  # what `fit` would come to first
    assert text == "A completion ends with '<eos>'. lit-qrl: This host is no good."


def test_a_policy_that_the_precision_plugin_cannot_train_is_refused(run):
    precision, folder = f"--config {CONFIGS / 'precision'}", Path("packed")
    quantize_checkpoint(MODEL, folder, formats.get("fp8_tensor"))
    packed = f"--model.policy.model {folder}"
    assert run(f"{precision}/fp8_tensor_lora.yaml", packed)[0] == 0
    for given, said in (
        (packed, "holds fp8_tensor codes, which only an adapter can be trained over"),
        (packed, "Add configs/precision/fp8_tensor_lora.yaml"),
        (f"{precision}/fp8_row_lora.yaml {packed}", "holds its weights in fp8_tensor"),
        (f"{precision}/qat_fp8_row.yaml {LORA}", "QATAligned trains the weights themselves"),
    ):
        status, _, text = run(given)
        assert (status, said in text) == (2, True), text


def test_a_folder_of_its_own_is_removed_again_and_a_full_disk_is_said(run, monkeypatch):
    status, _, _ = run("--trainer.default_root_dir a/b")
    assert status == 0
    assert not Path("a").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "free")(20 * 2**20))
    status, sizes, text = run()
    assert status == 2
    need = 2 * (sizes["weights"] + sizes["optimizer states"]) / 2**20
    assert f"Expected: {need:.1f} MiB for two of them" in text
    assert "Given: 20.0 MiB free" in text
    status, _, text = run("--dry_run 80 --trainer.accelerator gpu", dry=False)  # for another host
    assert status == 0
    assert "On this host: The disk has no room for the run's checkpoints." in text


def test_bits_of_a_packed_base_count_as_bits():
    shapes = {"up.weight": torch.Size((64, 64)), "norm.weight": torch.Size((64,))}
    learner = dry.Tensors(shapes, {"norm.weight"}, set(), {"up.weight"}, torch.bfloat16)
    assert learner.count({"up.weight"}) == 4096
    assert dry.as_table([dry.Part("weights", 3 * 2**30), dry.Part("unknown", float("nan"))]).endswith("3.00 GiB")


def test_routes_of_a_mixture_are_told(run):
    mixture = f"--model.policy.model {ROOT / 'models' / 'tiny-moe-countdown'}"
    status, sizes, text = run(mixture, "--publisher.exclude '[\"*.experts\"]' --trainer.callbacks+=RouterReplay")
    assert status == 0
    assert sizes["routes"] == 32 * 8 * (16 + 16) * 4 * 2  # four layers of two experts, a byte each
    assert "8 bytes a token, 256 sequences of 32 tokens, at most" in text


def test_masked_diffusion_has_a_cache_only_where_it_keeps_keys_and_values(run):
    status, sizes, text = run(quickstart="quickstart_diffusion")
    assert status == 0, text
    assert sizes["sampler's weights"] > 0
    assert "KV cache" not in sizes
    assert "KV cache" in run("--data.engine.reuse prompt", quickstart="quickstart_diffusion")[1]


def test_micro_batches_by_tokens_are_said_with_the_logits_that_they_leave(run):
    _, whole, text = run()
    assert "tokens of a micro-batch." in text
    status, sizes, text = run("--data.micro_batches auto")
    assert status == 0
    assert "tokens of a micro-batch, at most 8192." in text
    assert sizes["logits"] == whole["logits"]  # 256 completions of 12 tokens are fewer
    _, limited, text = run("--data.micro_batches auto --data.max_tokens_per_micro_batch 100")
    assert "tokens of a micro-batch, at most 100." in text
    assert limited["logits"] < sizes["logits"]


def engine_parts(engine, prompts, device="cpu"):
    """Return the memory of an engine, by part, that draws eight answers of eight tokens to prompts of sixteen."""
    shapes = {"up.weight": torch.Size((64, 64)), "norm.weight": torch.Size((64,))}
    learner = dry.Tensors(shapes, set(shapes), set(), {"up.weight"}, torch.bfloat16)
    sizes = {"max_prompt_tokens": 16, "max_completion_tokens": 8, "prompts_per_rank": prompts, "group_size": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 32}
    config = SimpleNamespace(num_hidden_layers=2, vocab_size=100, **heads)
    data = SimpleNamespace(engine=engine, **sizes)
    made = dry.engine_parts(data, SamplerSpec(), learner, config, dry.Target(torch.device(device)))
    return {part.name: part for part in made}


@pytest.mark.parametrize(
    ("device", "options", "rows"),
    [
        ("cuda", {"cuda_graphs": "auto"}, 512),
        ("cuda", {"cuda_graphs": True, "max_batch": 64}, 64),
        ("cuda", {"cuda_graphs": False}, 1024),
        ("cpu", {"cuda_graphs": "auto"}, 1024),
    ],
)
def test_recorded_steps_are_told_and_bound_the_rows(device, options, rows):
    parts = engine_parts(TransformersEngine(cache_gigabytes=1.0, **options), 128, device)
    assert parts["KV cache"].size == 2 * 2 * 2 * 8 * 2 * 24 * rows
    if device == "cuda" and options["cuda_graphs"]:
        assert parts["recorded steps"].size == rows * 100 * 16
    else:
        assert "recorded steps" not in parts


def test_of_an_engine_of_several_processes_each_has_its_part():
    one, half = (engine_parts(VLLMEngine(tensor_parallel_size=parts), 2) for parts in (1, 2))
    assert one["sampler's weights"].size == 2 * half["sampler's weights"].size == 2 * (64 * 64 + 64)
    assert half["sampler's weights"].note.endswith(", 1 of 2 parts")
    assert half["KV cache"] == one["KV cache"]  # half of each token's, of twice as many sequences


@pytest.mark.parametrize(("offload", "gib"), [(False, 1), (False, 100), (True, 1)])
def test_a_run_that_its_gpu_does_not_hold_is_refused_with_what_is_largest(offload, gib):
    trainer = SimpleNamespace(strategy=SimpleNamespace(offload=offload), world_size=2)
    parts = {"weights": 4, "gradients": 4, "optimizer states": 8, "reference": 0, "KV cache": 500, "adapters": 0}
    table = [dry.Part(name, size * 2**30) for name, size in parts.items()]
    if offload or gib > 16:
        dry.check_memory(table, trainer, gib * 2**30)
        return
    with pytest.raises(ConfigError, match=r"does not fit its GPU.* 16\.00 GiB on each of 2, 8\.00 GiB of it opt"):
        dry.check_memory(table, trainer, gib * 2**30)


def test_of_learner_and_engine_in_turns_the_larger_phase_counts():
    table = [dry.Part("weights", 2), dry.Part("optimizer states", 4), dry.Part("KV cache", 7), dry.Part("logits", 1)]
    for offload, most in ((False, 13), (True, 9)):
        trainer = SimpleNamespace(strategy=ColocatedStrategy(offload))
        assert sum(part.size for part in dry.at_a_time(table, trainer)) == most


def test_memory_is_judged_for_a_gpu_that_is_not_here(run):
    vllm = "--data.engine VLLMEngine --trainer.accelerator gpu --trainer.precision bf16-true"
    status, sizes, text = run("--dry_run 80", vllm, "--publisher.format fp8_row", dry=False)
    assert (status, sizes["weights"]) == (0, 2 * 987_776), text
    assert "Of the GPU's 80.00 GiB this leaves them 7" in text
    assert text.endswith("The configuration can be run; memory was judged for a GPU of 80 GiB.")
    own = "--dry_run 80 --trainer.accelerator gpu --trainer.precision bf16-true --publisher.format auto"
    _, sizes, text = run(own, dry=False)  # queries, keys and values are laid together
    assert sizes["sampler's weights"] == 4 * 2 * (256 + 128 + 128) * 128
    assert "most plain ones shared with the learner" in text
    assert run(f"{own} --data.engine.cuda_graphs false", dry=False)[1]["sampler's weights"] == 0
    _, codes, text = run(own.replace("auto", "fp8_row"), dry=False)
    assert "dequantized" not in text  # such a GPU multiplies codes
    _, values, text = run(own.replace("auto", "int4_group"), dry=False)
    assert ", and dequantized operands" in text
    assert values["sampler's weights"] > 2 * codes["sampler's weights"]
    status, _, text = run("--dry_run 0.005 --trainer.accelerator gpu", dry=False)
    assert status == 2
    assert "The run does not fit its GPU. Expected: at most 5.1 MiB" in text
    assert "more than the GPU's 5.1 MiB" in text


ALIGNED = plugin("QATAligned", weights="fp8_row")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--trainer.precision bf16-true", "off, the learner does not compute in a format that quantizes"),
        (f"{ALIGNED} --model.policy.dtype bf16", "cannot be had, This model was not seen to compute alike in vLLM and"),
        (f"{ALIGNED} --data.engine.same_kernels true", "on, as it is set"),
    ],
)
def test_what_same_kernels_will_do_is_told_without_a_gpu(run, options, told):
    status, _, text = run("--data.engine VLLMEngine", options, "--dry_run 80", dry=False)
    assert status == 0, text
    assert f"data.engine.same_kernels: {told}" in text


def test_of_several_processes_the_first_one_tells_and_all_go_through_the_same(capsys, monkeypatch):
    """What Lightning asks the others for on the way, such as the number of steps, all of them must answer."""
    done, peers = [], Peers()
    monkeypatch.setattr(dry, "tensors", lambda *args: done.append("tensors"))
    monkeypatch.setattr(dry, "without_weights", lambda module, trainer: done.append("without"))
    monkeypatch.setattr(peers, "teardown", lambda *args: done.append("parted"))
    other = SimpleNamespace(
        default_root_dir="gone",
        global_rank=1,
        callbacks=[peers],
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        fit=lambda module, datamodule: module.configure_model(),
    )
    dry.dry_run(other, SimpleNamespace(), SimpleNamespace(engine=None))
    assert done == ["tensors", "without", "parted"]
    assert capsys.readouterr().out == ""
