"""What a user may get wrong, given to the command line: one paragraph, status 2, and no model loaded."""

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lit_qrl.callbacks import AIS, RLCallback, TokenVeto
from lit_qrl.cli.export import export
from lit_qrl.policy import CausalPolicy
from lit_qrl.rewards import Reward
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.embedded.loading import Modules
from lit_qrl.run.event_log import EVENTS_FILE, read_jsonl
from tests.command_line import build_once, status_of
from tests.networks import build_denoiser
from tests.tiny_run import as_words, model_folder, on_sums

ROOT = Path(__file__).parent.parent
AIS_FILE = ROOT / "configs" / "correction" / "ais.yaml"
HERE = "tests.test_bad_input"


class ShortReward(Reward):
    def __call__(self, samples):
        return [1.0]


class HangingReward(Reward):
    time_limit = 0.2

    def __call__(self, samples):
        while True:
            pass


def few(completions):
    return [1.0]


def raising(completions, question):
    return [completion["content"] for completion in completions]


def needy(completions, solution):
    return [0.0] * len(completions)


NORM = "model.norm.weight"


class Bursting(RLCallback):
    """Leaves infinity in the last weight that the learner trains, after the first iteration."""

    def on_train_epoch_end(self, trainer, pl_module):
        with torch.no_grad():
            [weight for weight in pl_module.parameters() if weight.requires_grad][-1].fill_(float("inf"))


class Emptying(RLCallback):
    """Leaves no log-prob of a rollout finite."""

    def on_rollout_end(self, trainer, module, batch):
        batch.sampler_logprobs.fill_(float("nan"))


class Refusing(TokenVeto):
    """A callback of the user's own that raises an error of its own."""

    def __init__(self, power: float = 1.0) -> None:
        raise ValueError(f"power must be negative, not {power}")


def of(key, made):
    """Give a key a value that is JSON."""
    return f"--{key} '{json.dumps(made)}'"


def callback(name, **arguments):
    return of("trainer.callbacks", [{"class_path": name, "init_args": arguments}])


def plugin(name, **arguments):
    return of("trainer.plugins", [{"class_path": name, "init_args": arguments}])


def reward(name, **arguments):
    return of("data.task.rewards", [{"class_path": f"{HERE}.{name}", "init_args": arguments}])


SUMS = {"class_path": "DatasetTask", "init_args": {"path": "rows.jsonl", "name": "sums", "chat": False, "split": None}}


def benchmark(task=(), **options):
    return of("data.benchmarks", [{"task": {**SUMS, "init_args": {**SUMS["init_args"], **dict(task)}}, **options}])


USER = {"role": "user", "content": "1+1="}
CHATS = {
    "chat": [USER],
    "system": [{"role": "system", "content": "Think."}],
    "role": [{**USER, "role": "users"}],
    "none": [],
}


def chat(name):
    """Name a file of `CHATS`, each of one row."""
    return f"--data.task.path {name}.jsonl --data.task.prompt_column prompt --data.task.chat true"


MASKED = (
    "--model.policy DiffusionPolicy --model.policy.model denoiser --data.engine DiffusionEngine --data.engine.block 4"
)
LORA = "--model.policy.lora peft.LoraConfig --model.policy.lora.target_modules all-linear"
REMOTE = "--data.engine RemoteVLLMEngine"
MIXTURE = {"class_path": "Mixture", "init_args": {"tasks": [SUMS], "weights": [1, 2]}}
REASONING_GYM = {"class_path": "ReasoningGym", "init_args": {"task": "chain_sum"}}
ENVIRONMENT = {"class_path": "Environment", "init_args": {"env": "wordle"}}
SHARDS = {"class_path": "lightning.pytorch.strategies.ModelParallelStrategy"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(model, tmp_path, monkeypatch, capsys, quick_plots):
    """Return (status, paragraph, whether weights were asked for) of `lit-qrl fit` on rows of sums."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: False))
    build_once(monkeypatch)
    loaded = []
    load = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: loaded.append(a) or load(*a, **k))
    options = as_words(on_sums(tmp_path, model))

    def run(*given):
        capsys.readouterr()
        status = status_of(["fit", *options, *shlex.split(" ".join(given))])
        return status, " ".join(capsys.readouterr().err.split()), bool(loaded)

    return run


def told(result, status, said):
    """Assert that a run ended with a status, and that what was said has all that `said` has between its dots."""
    found, text, _ = result
    assert found == status
    assert "Traceback" not in text
    paragraph = text[text.index("lit-qrl: ") :]
    for words in said.split(" … "):
        assert words in paragraph, paragraph


def refused(result, said, loaded=False):
    told(result, 2, said)
    assert result[2] is loaded


def stopped(result, said):
    told(result, 70, said)


KNOWN_BEFORE_A_MODEL = {
    "--data.group_sizes 8": "--data.group_sizes … '--data.group_size'",
    "--trainer.max_epoch 8": "--trainer.max_epoch is not … '--trainer.max_epochs'",
    "--model.objective GRPO --model.objective.clip 1": "'clip'",
    "--config '{data: {group_siz: 8}}'": "there is no option 'data.group_siz'. Did you mean 'data.group_size'?",
    "--quiet": "--quiet is not an option of this command. See --help for the options; docs/from_trl.md",
    "configs/a.yaml": "comes after --config. Given: configs/a.yaml. Write --config configs/a.yaml.",
    "--data.engine '{class_path: Transformer}'": "no class 'Transformer'. Did you mean 'TransformersEngine'?",
    "--data.micro_batches 4.5": "the value is not one of the choices. Expected: int, auto. Given: 4.5.",
    "--trainer.max_epochs x": "trainer.max_epochs: the value has the wrong type. Expected: int or null. Given: x.",
    "--model.optimizer torch.optim.AdamW --model.optimizer.lr abc": "wrong type. Expected: float. Given: abc.",
    "--trainer.callbacks+=AISS": "no class 'AISS' … Did you mean 'AIS'?",
    "--trainer.callbacks+=RouterReplay": "replays which experts … Qwen3ForCausalLM … Remove RouterReplay",
    "--model.optimizer nosuch.AdamW": "No module named 'nosuch'",
    "--model.optimizer torch.optim.SGD": "SGD without a learning rate … Set model.optimizer.init_args.lr",
    "--model.optimizer torch.optim.LBFGS --model.optimizer.lr 1": "the loss several times … torch.optim.AdamW",
    "--model.lr_scheduler ReduceLROnPlateau": "several classes … lightning.pytorch.cli.ReduceLROnPlateau",
    "--trainer.callbacks '[AIS, RatioRejection]'": "trainer.callbacks.upper: required, but not given … init_args",
    "--trainer.enable_checkpointing false": "enable_checkpointing=False … trainer.enable_checkpointing",
    "--trainer.barebones true": "barebones mode … or trainer.barebones.",
    "--model.optimizer torch.optim.AdamW --model.optimizer.weight_decay -1": "cannot be built … -1 … init_args",
    "--publisher.format x": "There is no such number format. Given: x. Choose one of bf16, fp16",
    "--model.optimizer torch.optim.Muon --model.optimizer.lr 1e-6": "Use MuonAdamW",
    "--publisher.format fp8_rows": "fp8_rows … Did you mean 'fp8_row'?",
    callback("RatioRejection", upper=0.01, lower=0.001, divergence="k3"): "upper bound alone … Remove lower",
    callback("RatioRejection", divergence="k3"): "upper",
    "--data.group_size eight": "data.group_size … Expected: int … Given: eight",
    "--dry_run 80GB": "dry_run … Expected: true or false or float … Given: 80GB",
    "--dry_run 0": "--dry_run … its size in GiB … Given: 0",
    "--data.long_prompt cut": "data.long_prompt … Expected: drop, error … Given: cut",
    "--model.policy.dtype int3": "model.policy.dtype … Given: int3",
    "--seed_everything -1": "seed_everything is out of range … 0 to 2³² − 1 … Given: -1",
    "--data.top_k -5": "data.top_k is too small … Given: -5",
    "--model.policy.model many": "no config.json … Choose one of … many/one",
    f"{plugin('QATAligned')} --trainer.plugins+=UnifiedFP8": "for Precision … [QATAligned, UnifiedFP8]",
    f"{plugin('QATAligned')} --trainer.precision bf16-mixed": "`plugins=QATAligned` … Correct trainer.precision",
    "--config nope.yaml": "nope.yaml … does not exist",
    "--config text.yaml": "holds no keys",
    f"--config {AIS_FILE} --trainer.callbacks+=AIS": "holds AIS twice … each callback once … Remove one",
    "--trainer.callbacks+=WeightPublisher": "holds WeightPublisher … `publisher` … --publisher.",
    "--trainer.callbacks '[Timer, Timer]'": "more than one stateful callback of type `Timer`",
    f"--data.task.rewards+={HERE}.fiew": "no function 'fiew' in tests.test_bad_input … Did you mean 'few'?",
    reward("needy"): f"function {HERE}.needy … 'solution' is no column … Given: needy(completions, solution)",
    reward("few", wait=1): "'wait'",
    reward("ShortRewerd", limit=1): "no function 'ShortRewerd' … Did you mean 'ShortReward'?",
    "--data.reward_weights '{maths: 0.5}'": "names no reward of the task: 'maths' … Did you mean 'math'?",
    "--data.task.path rowz.jsonl": "'rowz.jsonl' does not exist … Did you mean 'rows.jsonl'?",
    "--data.task.prompt_column questions": "no column 'questions' … question, answer … Did you mean 'question'?",
    "--data.task.path empty.jsonl": "is empty … at least one row",
    "--data.max_prompt_tokens 4 --data.long_prompt error": "= 4 … up to 5 tokens … set data.long_prompt to drop",
    "--data.max_prompt_tokens 2": "evaluation prompts are too long … Raise the limit.",
    "--data.group_size 1 --model.objective GRPO --model.objective.scale group": "at least 2 … Raise data.group_size",
    "--data.mini_batches 3": "not divisible … multiple of 3 … Given: 4",
    "--data.max_tokens_per_micro_batch 100": "at most 100 padded tokens … Set data.micro_batches to 2.",
    "--data.micro_batches 3": "not divisible … divisor of its 16 … Given: 3",
    plugin("UnifiedFP8", backend="torch"): "backend torch cannot run here … emulate",
    "--trainer.accelerator cuda": "CUDAAccelerator … accelerator is not available",
    "--trainer.accelerator gpuu": "cannot build the Trainer … trainer.accelerator: gpuu … Correct trainer.accelerator",
    "--trainer.accelerator tpu": "torch_xla … trainer.accelerator: tpu",
    "--trainer.devices 0": "cannot build the Trainer … trainer.devices: 0 … Correct trainer.accelerator or",
    "--trainer.devices [0,1]": "cannot build the Trainer … trainer.devices: [0, 1]. Correct trainer.devices.",
    "--trainer.max_epochs -3": "cannot build the Trainer … trainer.max_epochs: -3. Correct trainer.max_epochs.",
    "--trainer.strategy dddp": "cannot build the Trainer … trainer.strategy: dddp. Correct trainer.strategy.",
    "--trainer.strategy ShardedStrategy": "ShardedStrategy is a class: set trainer.strategy.class_path to it",
    "--trainer.strategy fsdp": "requires a GPU … trainer.strategy: fsdp … or trainer.strategy.",
    f"{of('trainer.strategy', SHARDS)} --trainer.devices 2": "shards the learner … ShardedStrategy, which gathers",
    "--trainer.precision bf17": "64, 32, 16,  … bf16-true, bf16-mixed … Given: bf17 … Did you mean 'bf16'?",
    "--trainer.logger Tensor": "no class 'Tensor' … Did you mean 'TensorBoardLogger'",
    "--trainer.logger Ledger": "no class 'Ledger' … CSVLogger,  … TensorBoardLogger",
    "--trainer.logger.save_dir x": "no option 'save_dir'. If no class is chosen yet, set trainer.logger.class_path",
    "--model.policy.lora.r 3": "no option 'r' … lora.class_path first (such as peft.LoraConfig)",
    f"{MASKED} --data.engine.steps 3": "steps does not divide a block … a divisor of 4: 1, 2, 4 … Set it to",
    f"{REMOTE} --data.engine.hosts [node:80]": "needs the servers' token … data.engine.token_file … lit-qrl serve",
    f"{REMOTE} --data.engine.hosts [127.0.0.1:9] --data.engine.token_file token": "cannot be reached … lit-qrl serve",
    f"{REMOTE} --data.engine.devices [77]": "data.engine.devices names what is not there … 77",
    "--model.policy.model no-body/nothing": "cannot be loaded … no-body/nothing … hf download NAME",
    "--model.policy.model empty/nothing": "does not exist … Correct the path … work in a folder without 'empty'",
    "--ckpt_path before": "The checkpoint is a folder … Given: before … Set --ckpt_path before/checkpoints/last.ckpt",
    "--ckpt_path other.ckpt": "another model … Expected: hidden_size 64 … Given: hidden_size 32 … model.policy",
    "--ckpt_path foreign.ckpt": "holds no policy … --ckpt_path",
    callback(f"{HERE}.Refusing"): "A class refused its arguments: power must be negative, not 1.0.",
    callback("MaskedIS", lower=0.9, upper=0.5): "MaskedIS … 1 <= upper … upper 0.5",
    callback("GeometricRejection", lower=1.2, upper=1.1): "GeometricRejection … lower 1.2, upper 1.1",
    "--model.objective GRPO --model.objective.adaptive_clip 0.5": "objective.adaptive_clip … 1 <= upper … upper 0.5",
    "--model.objective TBPO --model.objective.mismatch_cap 0.5": "mismatch_cap > 1 … Given: 0.5",
    callback("TokenVeto", threshold=-4): "0 < threshold < 1 … Given: -4 … logarithm",
    callback("OffPolicySequenceMask", delta=-0.1): "delta > 0 … Given: -0.1",
    f"--config {AIS_FILE} --trainer.callbacks+=TruncatedIS": "AIS and TruncatedIS both multiply … power 2 … Keep one",
    callback("AQNNoise", schedule="cosin"): "callbacks.schedule … exponential, linear … Did you mean 'cosine'?",
    plugin("QATAligned", wieghts="nvfp4"): "no option 'wieghts' … Did you mean 'weights'?",
    callback("AQNNoise", start=1e-4, end=1e-2): "end <= start … start = 0.0001, end = 0.01",
    callback("AQNNoise", num_stages=2, norms=["*.input_layernorm.weight", "*.post_atn"]): "Given: *.post_atn. Set",
    callback("AQNNoise", num_stages=2, norms=["*.weight"]): "is no norm's weight … Given: *.weight",
    callback("AQNNoise", num_stages=2, norms=[]): "matches no parameter of this model … Given: no pattern",
    f"{callback('AQNNoise', num_stages=2)} --trainer.max_epochs -1 --trainer.max_steps 8": "the run has no length",
    callback("MemoryLimit", gib=1.0): "of a GPU's memory … trainer.accelerator: gpu. Given: cpu. Remove the callback.",
    plugin("NVFP4LoRA", format="bf16"): "weight-only format … fp8_row … Given: bf16 … QATAligned",
    "--data.max_completion_tokens 100": "at most 64 positions … of 5 tokens and up to 100 … Lower data.max_completion",
    chat(
        "system"
    ): "Row 1 of 'system.jsonl', column 'prompt', … ends with nothing to answer … turns of system … Correct or remove",
    chat("role"): "Turn 1 of row 1 of 'role.jsonl' … unknown role … mean 'user'?",
    chat("none"): "Row 1 of 'none.jsonl' … is an empty list … role: user … Correct or",
    f"{chat('chat')} --data.task.chat false": "is a conversation … Leave chat out",
    f"{chat('chat')} --data.task.answer_column prompt": "has no answer … of role user … Name another answer_column",
    benchmark(sample=4): "data.benchmarks … no option 'sample' … 'samples'",
    benchmark(samples=4, pass_at=[8]): "sums's pass_at is out of range … 1 to 4 samples … Given: [8]",
    benchmark(task={"prompt_column": "questions"}): "no column 'questions' … 'question'",
    "--data.evaluate_task false": "nothing to evaluate on … or a benchmark",
    benchmark(completion_tokens=100, size=1): "up to 100 … completion_tokens of the benchmark sums",
    "--data.task.split null": "The task has no training rows … set data.task.split",
    of("data.task", MIXTURE): "weights of a mixture do not fit its tasks … 1 positive numbers … [1.0, 2.0]",
    of("data.task", REASONING_GYM): "needs the library reasoning-gym … pip install 'lit-qrl[environments]'",
    of("data.task", ENVIRONMENT): "needs the library verifiers … pip install 'lit-qrl[environments]'",
}


@pytest.fixture
def files(tmp_path, model):
    """The files that the cases name."""
    (tmp_path / "text.yaml").write_text("x")
    (tmp_path / "token").write_text("x" * 32)
    (tmp_path / "token").chmod(0o600)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "before" / "checkpoints").mkdir(parents=True)
    (tmp_path / "before" / "checkpoints" / "last.ckpt").touch()
    shutil.copytree(model, tmp_path / "many" / "one")
    for name, turns in CHATS.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": turns, "answer": "2"}) + "\n")
    model_folder(tmp_path / "denoiser", build_denoiser)
    shutil.copytree(model, tmp_path / "nan")
    weights = load_file(tmp_path / "nan" / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][0, 0] = float("nan")
    save_file(weights, tmp_path / "nan" / "model.safetensors", metadata={"format": "pt"})
    shape = {"model_type": "qwen3", "vocab_size": 24, "hidden_size": 32, "num_hidden_layers": 2}
    policy = {**shape, "adapter": None, "rank": None}
    torch.save({"state_dict": {}, "policy": policy}, tmp_path / "other.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")


@pytest.mark.parametrize("given", KNOWN_BEFORE_A_MODEL)
def test_what_is_known_before_a_model_is_loaded(given, run, files, tmp_path, monkeypatch):
    for library in ("reasoning_gym", "verifiers"):  # as where the extra is missing
        monkeypatch.setitem(sys.modules, library, None)
    refused(run(given), KNOWN_BEFORE_A_MODEL[given])
    assert not (tmp_path / "run" / "metrics.csv").exists()


# ---------------------------------------------------------------------------------------------- known with the model


WEIGHT = "model.layers.1.self_attn.k_proj.weight"
KNOWN_WITH_A_MODEL = {
    plugin("NVFP4LoRA"): "NVFP4LoRA freezes the base … peft.LoraConfig … or use QATAligned",
    "--model.policy.model nan": f"{WEIGHT} holds NaN or inf … Take another checkpoint",
    f"--model.policy.model nan {plugin('NVFP4LoRA')} {LORA}": f"{WEIGHT} … NaN or inf",
}


@pytest.mark.parametrize("given", KNOWN_WITH_A_MODEL)
def test_what_is_known_with_the_model_comes_before_anything_is_drawn(given, run, files, tmp_path):
    told(run(given), 2, KNOWN_WITH_A_MODEL[given])
    assert not (tmp_path / "run" / "samples.jsonl").exists()


# ------------------------------------------------------------------------------------------- known in the run alone


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ShortReward", "'ShortReward' … wrong number of scores … Expected: 16 … Given: 1"),
        ("HangingReward", "'HangingReward' … not done within 0.2 s … raise its `time_limit`"),
        ("few", f"'few' (function {HERE}.few) … wrong number of scores … Expected: 16 … Given: 1"),
        ("raising", f"function {HERE}.raising … TypeError … test_bad_input.py, line … concurrency: 1"),
    ],
)
def test_a_reward_that_breaks_its_contract_ends_the_run_with_its_report(name, said, run, tmp_path):
    refused(run(reward(name)), said, loaded=True)
    assert (tmp_path / "run" / "report" / "index.html").exists()


@pytest.fixture
def garbled(monkeypatch):
    """Let the engine hold another norm than it was sent, from that publish on."""

    def garble(first):
        original, count = Modules.set_plain, [0]

        def broken(modules, name, tensor):
            count[0] += name == NORM
            original(modules, name, tensor + 1 if name == NORM and count[0] > first else tensor)

        monkeypatch.setattr(Modules, "set_plain", broken)

    return garble


def test_a_publish_that_did_not_arrive_ends_the_run_with_its_report(run, garbled, tmp_path):
    garbled(first=1)
    result = run("--trainer.max_epochs 3 --publisher.format fp8_row")
    fault = f"publish 1 did not arrive as sent. different: {NORM} differs from what was sent."
    stopped(result, f"{fault} … publisher.on_fault: retry … run/report/index.html … run/checkpoints/last.ckpt")
    assert (tmp_path / "run" / "report" / "index.html").exists()
    kinds = [event["kind"] for event in read_jsonl(tmp_path / "run" / EVENTS_FILE)]
    assert kinds[0] == "start"
    assert kinds[-2:] == ["publish_fault", "exception"]


def test_a_publish_that_lacks_a_tensor_is_refused_in_one_paragraph(run, monkeypatch, tmp_path):
    original = TransformersEngine.load_weights

    def lossy(engine, tensors, format, version):
        return original(engine, (pair for pair in tensors if pair[0] != NORM), format, version)

    monkeypatch.setattr(TransformersEngine, "load_weights", lossy)
    stopped(run(), f"publish is incomplete: 1 of … {NORM} … on_publish … No checkpoint had been written.")


def test_a_policy_that_leaves_out_a_layer_is_refused_in_one_paragraph(run, monkeypatch):
    original = CausalPolicy.named_weights

    def lossy(policy):
        return (pair for pair in original(policy) if "layers.1.self_attn.v_proj" not in pair[0])

    monkeypatch.setattr(CausalPolicy, "named_weights", lossy)
    said = "publish that was refused. The stream of weights is incomplete … layers.1.self_attn.v_proj"
    stopped(run("--publisher.format fp8_row"), said)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("", f"The run was stopped. {NORM} holds NaN or inf … lower the learning rate … run/report/index.html"),
        (f"{LORA} --publisher.lora adapter", "The run was stopped.  … lora_B … NaN or inf … lower the learning rate"),
    ],
    ids=["weights", "adapter"],
)
def test_weights_that_are_no_numbers_any_more_end_the_run_in_one_paragraph(run, more, said):
    stopped(run(callback(f"{HERE}.Bursting"), "--trainer.max_epochs 2", more), said)


def test_an_evaluation_whose_publish_fails_ends_the_same(run, garbled):
    garbled(first=0)
    said = f"publish before the first iteration … {NORM} … run/report/index.html"
    stopped(run("--trainer.limit_val_batches 1"), said)


def test_a_run_that_the_guard_stops_is_no_bad_input(run):
    said = "stopped by the guard:  … had a non-finite log-prob … No checkpoint had been written."
    stopped(run(callback(f"{HERE}.Emptying")), said)


def test_an_adapter_is_trained_without_a_warning_of_settings_that_nobody_gave(run, recwarn, tmp_path):
    assert run(LORA)[0] == 0
    export(tmp_path / "run", output=tmp_path / "out")
    assert not [warning for warning in recwarn if "loftq_config" in str(warning.message)]


def test_long_prompts_are_dropped_with_a_count(run, caplog):
    with caplog.at_level("INFO", logger="lit_qrl"):
        assert run("--data.max_prompt_tokens 4")[0] == 0
    # Two of the twelve numbers have two digits; how many of them are held out is the seed's.
    dropped = [record.message for record in caplog.records if record.message.startswith("Dropped")]
    assert dropped
    assert all("prompts over 4 tokens" in message for message in dropped)


def test_a_checkpoint_of_the_same_model_is_taken(run, tmp_path, monkeypatch):
    assert run()[0] == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    on = f"--ckpt_path {checkpoint}"
    status, text, _ = run(on, "--trainer.max_epochs 2")
    assert (status, "lit-qrl:" in text) == (0, False)
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 2
    refused(run(on), "has had 2 iterations already … max_epochs above 2 … Given: 1", loaded=True)
    said = []
    monkeypatch.setattr("lit_qrl.cli.training.say", said.append)
    assert run(on, "--trainer.max_epochs 2")[0] == 0
    assert "The run has had its 2 iterations. To go on, raise trainer.max_epochs, which counts them too." in said


def test_a_metric_that_early_stopping_does_not_find_is_one_paragraph(run):
    stopping = callback("lightning.pytorch.callbacks.EarlyStopping", monitor="reward/meen")
    refused(run(stopping), "metric `reward/meen` which is not available … `reward/mean`", loaded=True)


def test_python_raises_what_the_command_line_prints():
    with pytest.raises(ValueError, match="saturation > 0"):
        AIS(saturation=0.0)
