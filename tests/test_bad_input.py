"""What a user may get wrong, given to the command line: one paragraph, status 2, and no model loaded."""

import json
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
from lit_qrl.cli.main import main
from lit_qrl.policy import CausalPolicy
from lit_qrl.rewards import Reward
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.embedded.loading import Modules
from lit_qrl.run.event_log import EVENTS_FILE, read_jsonl
from tests.command_line import build_once
from tests.networks import build_denoiser
from tests.tiny_run import model_folder

ROOT = Path(__file__).parent.parent
CORRECTIONS = ROOT / "configs" / "correction"


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


class Refusing(TokenVeto):
    """A callback of the user's own that raises an error of its own."""

    def __init__(self, power: float = 1.0) -> None:
        raise ValueError(f"power must be negative, not {power}")


def callback(name, **arguments):
    return ["--trainer.callbacks", json.dumps([{"class_path": name, "init_args": arguments}])]


def plugin(name, **arguments):
    return ["--trainer.plugins", json.dumps([{"class_path": name, "init_args": arguments}])]


def rejection(**arguments):
    return ["--trainer.callbacks", json.dumps([{"class_path": "RatioRejection", "init_args": arguments}])]


SUMS = {"class_path": "DatasetTask", "init_args": {"path": "rows.jsonl", "name": "sums", "chat": False, "split": None}}


def benchmark(task=(), **options):
    of = {**SUMS, "init_args": {**SUMS["init_args"], **dict(task)}}
    return ["--data.benchmarks", json.dumps([{"task": of, **options}])]


USER = {"role": "user", "content": "1+1="}
CHATS = {
    "chat": [USER],
    "system": [{"role": "system", "content": "Think."}],
    "role": [{**USER, "role": "users"}],
    "none": [],
}


def chat(name, *more):
    """Name a file of `CHATS`, each of one row."""
    return [
        "--data.task.path",
        f"{name}.jsonl",
        "--data.task.prompt_column",
        "prompt",
        "--data.task.chat",
        "true",
        *more,
    ]


def reward(cls):
    return ["--data.task.rewards", json.dumps([{"class_path": f"tests.test_bad_input.{cls.__name__}"}])]


MASKED = [
    *("--model.policy", "DiffusionPolicy", "--model.policy.model", "denoiser"),
    *("--data.engine", "DiffusionEngine", "--data.engine.block", 4),
]
"""A masked-diffusion policy and its engine."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(model, tmp_path, monkeypatch, capsys, quick_plots):
    """Return (status, paragraph, whether weights were asked for) of `lit-qrl fit` on rows of sums."""
    rows = [{"question": f"1+{i}=", "answer": str(i + 1)} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: False))
    build_once(monkeypatch)
    loaded = []
    load = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: loaded.append(a) or load(*a, **k))
    base = {
        "model.policy": "CausalPolicy",
        "model.policy.model": model,
        "data.task": "DatasetTask",
        "data.task.path": "rows.jsonl",
        "data.task.chat": "false",
        "data.task.evaluation_size": 4,
        "data.engine": "TransformersEngine",
        "data.prompts_per_iteration": 4,
        "data.group_size": 4,
        "data.max_prompt_tokens": 8,
        "data.max_completion_tokens": 4,
        "trainer.accelerator": "cpu",
        "trainer.max_epochs": 1,
        "trainer.limit_val_batches": 0,
        "trainer.enable_progress_bar": "false",
        "trainer.default_root_dir": str(tmp_path / "run"),
    }

    def run(*args):
        options = [part for key, value in base.items() for part in (f"--{key}", str(value))]
        status = 0
        capsys.readouterr()
        try:
            main(["fit", *options, *map(str, args)])
        except SystemExit as stop:
            status = stop.code
        return status, " ".join(capsys.readouterr().err.split()), bool(loaded)

    return run


def refused(result, *words, loaded=False):
    status, text, asked = result
    assert status == 2
    assert "Traceback" not in text
    assert asked is loaded
    paragraph = text[text.index("lit-qrl: ") :]
    for word in words:
        assert word in paragraph, paragraph


KNOWN_BEFORE_A_MODEL = {
    "unknown key": (["--data.group_sizes", 8], ["--data.group_sizes", "'--data.group_size'"]),
    "abbreviated key": (["--trainer.max_epoch", 8], ["--trainer.max_epoch is not", "'--trainer.max_epochs'"]),
    "unknown key of a class": (["--model.objective", "GRPO", "--model.objective.clip", 1], ["'clip'"]),
    "unknown callback": (["--trainer.callbacks+=AISS"], ["no class 'AISS'", "Did you mean 'AIS'?"]),
    "replay of routes on a dense model": (
        ["--trainer.callbacks+=RouterReplay"],
        ["RouterReplay replays which experts each token took", "Qwen3ForCausalLM", "Remove RouterReplay"],
    ),
    "optimizer of a library that is missing": (["--model.optimizer", "nosuch.AdamW"], ["No module named 'nosuch'"]),
    "optimizer of another kind without its rate": (
        ["--model.optimizer", "torch.optim.SGD"],
        ["SGD without a learning rate", "Set model.optimizer.init_args.lr"],
    ),
    "optimizer that asks for the loss again": (
        ["--model.optimizer", "torch.optim.LBFGS", "--model.optimizer.lr", 1],
        ["LBFGS evaluates the loss several times", "torch.optim.AdamW"],
    ),
    "scheduler of a name that two classes have": (
        ["--model.lr_scheduler", "ReduceLROnPlateau"],
        ["several classes 'ReduceLROnPlateau'", "lightning.pytorch.cli.ReduceLROnPlateau"],
    ),
    "callback without what it requires": (
        ["--trainer.callbacks", "[AIS, RatioRejection]"],
        ["trainer.callbacks.upper: required, but not given", "init_args"],
    ),
    "no checkpoints": (
        ["--trainer.enable_checkpointing", "false"],
        ["enable_checkpointing=False", "trainer.enable_checkpointing"],
    ),
    "barebones": (["--trainer.barebones", "true"], ["barebones mode", "or trainer.barebones."]),
    "setting that the optimizer refuses": (
        ["--model.optimizer", "torch.optim.AdamW", "--model.optimizer.weight_decay", -1],
        ["model.optimizer cannot be built", "-1", "init_args"],
    ),
    "format that nothing is like": (
        ["--publisher.format", "x"],
        ["There is no such number format. Given: x. Choose one of bf16, fp16"],
    ),
    "plain Muon": (["--model.optimizer", "torch.optim.Muon", "--model.optimizer.lr", 1e-6], ["Use MuonAdamW"]),
    "unknown format": (["--publisher.format", "fp8_rows"], ["fp8_rows", "Did you mean 'fp8_row'?"]),
    "rejection with a band of k3": (
        rejection(upper=0.01, lower=0.001, divergence="k3"),
        ["upper bound alone", "lower: null", "Remove lower"],
    ),
    "rejection without a bound": (rejection(divergence="k3"), ["upper"]),
    "wrong type": (["--data.group_size", "eight"], ["data.group_size", "Expected: int", "Given: eight"]),
    "a dry run for no size": (["--dry_run", "80GB"], ["dry_run", "Expected: true or false or float", "Given: 80GB"]),
    "a dry run for no GPU": (["--dry_run", "0"], ["--dry_run", "its size in GiB", "Given: 0"]),
    "wrong choice": (["--data.long_prompt", "cut"], ["data.long_prompt", "Expected: drop, error", "Given: cut"]),
    "wrong choice of a class": (["--model.policy.dtype", "int3"], ["model.policy.dtype", "Given: int3"]),
    "seed that is none": (["--seed_everything", -1], ["seed_everything is out of range", "0 to 2³² − 1", "Given: -1"]),
    "sampling of the rollout": (["--data.top_k", -5], ["data.top_k is too small", "Given: -5"]),
    "folder of models": (["--model.policy.model", "many"], ["no config.json", "Choose one of", "many/one"]),
    "two precision plugins": (
        [*plugin("QATAligned"), "--trainer.plugins+=UnifiedFP8"],
        ["multiple values for Precision", "[QATAligned, UnifiedFP8]"],
    ),
    "precision beside a plugin": (
        [*plugin("QATAligned"), "--trainer.precision", "bf16-mixed"],
        ["`plugins=QATAligned`", "Correct trainer.precision"],
    ),
    "missing config": (["--config", "nope.yaml"], ["nope.yaml", "does not exist"]),
    "config without keys": (["--config", "text.yaml"], ["holds no keys"]),
    "callback twice": (
        ["--config", CORRECTIONS / "ais.yaml", "--trainer.callbacks+=AIS"],
        ["holds AIS twice", "each callback once", "Remove one"],
    ),
    "callback that is always there": (
        ["--trainer.callbacks+=WeightPublisher"],
        ["holds WeightPublisher", "`publisher`", "--publisher."],
    ),
    "callbacks of one state": (
        ["--trainer.callbacks+=lightning.pytorch.callbacks.Timer"] * 2,
        ["more than one stateful callback of type `Timer`"],
    ),
    "reward function that is not there": (
        ["--data.task.rewards+=tests.test_bad_input.fiew"],
        ["no function 'fiew' in tests.test_bad_input", "Did you mean 'few'?"],
    ),
    "reward function with a column that is not there": (
        ["--data.task.rewards", '[{"class_path": "tests.test_bad_input.needy"}]'],
        ["function tests.test_bad_input.needy", "'solution' is no column", "Given: needy(completions, solution)"],
    ),
    "setting of a reward function": (
        ["--data.task.rewards", '[{"class_path": "tests.test_bad_input.few", "init_args": {"wait": 1}}]'],
        ["'wait'"],
    ),
    "weight of a reward that is not there": (
        ["--data.reward_weights", '{"maths": 0.5}'],
        ["data.reward_weights names no reward of the task: 'maths'", "Did you mean 'math'?"],
    ),
    "missing file": (["--data.task.path", "rowz.jsonl"], ["'rowz.jsonl' does not exist", "Did you mean 'rows.jsonl'?"]),
    "missing column": (
        ["--data.task.prompt_column", "questions"],
        ["no column 'questions'", "question, answer", "Did you mean 'question'?"],
    ),
    "empty data set": (["--data.task.path", "empty.jsonl"], ["is empty", "at least one row"]),
    "long prompts are an error": (
        ["--data.max_prompt_tokens", 4, "--data.long_prompt", "error"],
        ["prompts are too long", "data.max_prompt_tokens = 4", "up to 5 tokens", "set data.long_prompt to drop"],
    ),
    "all prompts are too long": (
        ["--data.max_prompt_tokens", 2],
        ["evaluation prompts are too long", "Raise the limit."],
    ),
    "group of one": (
        ["--data.group_size", 1, "--model.objective", "GRPO", "--model.objective.scale", "group"],
        ["at least 2", "Given: 1", "Raise data.group_size"],
    ),
    "mini-batches": (["--data.mini_batches", 3], ["not divisible", "multiple of 3", "Given: 4"]),
    "micro-batches": (["--data.micro_batches", 3], ["not divisible", "divisor of its 16", "Given: 3"]),
    "backend that the device lacks": (
        ["--trainer.plugins", json.dumps([{"class_path": "UnifiedFP8", "init_args": {"backend": "torch"}}])],
        ["backend torch cannot run here", "emulate"],
    ),
    "device that is not there": (
        ["--trainer.accelerator", "cuda"],
        ["CUDAAccelerator", "accelerator is not available"],
    ),
    "accelerator that does not exist": (
        ["--trainer.accelerator", "gpuu"],
        ["cannot build the Trainer", "trainer.accelerator: gpuu", "Correct trainer.accelerator"],
    ),
    "strategy of a GPU": (
        ["--trainer.strategy", "fsdp"],
        ["requires a GPU", "trainer.strategy: fsdp", "or trainer.strategy."],
    ),
    "learner in parts": (
        [
            "--trainer.strategy",
            json.dumps({"class_path": "lightning.pytorch.strategies.ModelParallelStrategy"}),
            "--trainer.devices",
            2,
        ],
        ["ModelParallelStrategy shards the learner", "ShardedStrategy, which gathers them"],
    ),
    "precision": (
        ["--trainer.precision", "bf17"],
        ["64, 32, 16, ", "bf16-true, bf16-mixed", "Given: bf17", "Did you mean 'bf16'?"],
    ),
    "beginning of a logger": (
        ["--trainer.logger", "Tensor"],
        ["no class 'Tensor'", "Did you mean 'TensorBoardLogger'"],
    ),
    "unknown logger": (["--trainer.logger", "Ledger"], ["no class 'Ledger'", "CSVLogger, ", "TensorBoardLogger"]),
    "option of an adapter that is not chosen": (
        ["--model.policy.lora.r", 3],
        ["no option 'r'", "lora.class_path first (such as peft.LoraConfig)"],
    ),
    "steps that do not divide a block": (
        [*MASKED, "--data.engine.steps", 3],
        ["data.engine.steps does not divide a block", "a divisor of 4: 1, 2, 4", "Set it to"],
    ),
    "engines of servers without a token": (
        ["--data.engine", "RemoteVLLMEngine", "--data.engine.hosts", '["node:80"]'],
        ["data.engine.hosts needs the servers' token", "data.engine.token_file", "lit-qrl serve"],
    ),
    "a server that is not there": (
        [
            *("--data.engine", "RemoteVLLMEngine", "--data.engine.hosts", '["127.0.0.1:9"]'),
            *("--data.engine.token_file", "token"),
        ],
        ["The vLLM server at http://127.0.0.1:9 cannot be reached", "lit-qrl serve"],
    ),
    "engines on devices that are not there": (
        ["--data.engine", "RemoteVLLMEngine", "--data.engine.devices", "[77]"],
        ["data.engine.devices names what is not there", "77"],
    ),
    "name that cannot be reached": (
        ["--model.policy.model", "no-body/nothing"],
        ["cannot be loaded", "no-body/nothing", "hf download NAME"],
    ),
    "name under a folder that is here": (
        ["--model.policy.model", "empty/nothing"],
        ["does not exist", "Given: empty/nothing", "Correct the path", "work in a folder without 'empty'"],
    ),
    "folder of a run as checkpoint": (
        ["--ckpt_path", "before"],
        ["The checkpoint is a folder", "Given: before", "Set --ckpt_path before/checkpoints/last.ckpt"],
    ),
    "checkpoint of another model": (
        ["--ckpt_path", "other.ckpt"],
        ["another model", "Expected: hidden_size 64", "Given: hidden_size 32", "model.policy"],
    ),
    "checkpoint of another program": (["--ckpt_path", "foreign.ckpt"], ["holds no policy", "--ckpt_path"]),
    "class that refuses its arguments": (
        callback("tests.test_bad_input.Refusing"),
        ["A class refused its arguments: power must be negative, not 1.0."],
    ),
    "MIS band upside down": (callback("MaskedIS", lower=0.9, upper=0.5), ["MaskedIS", "1 <= upper", "upper 0.5"]),
    "rejection band upside down": (
        callback("GeometricRejection", lower=1.2, upper=1.1),
        ["GeometricRejection", "lower 1.2, upper 1.1"],
    ),
    "clip of truncated ratios": (
        ["--model.objective", "GRPO", "--model.objective.adaptive_clip", 0.5],
        ["objective.adaptive_clip", "1 <= upper", "upper 0.5"],
    ),
    "cap of TBPO": (
        ["--model.objective", "TBPO", "--model.objective.mismatch_cap", 0.5],
        ["mismatch_cap > 1", "Given: 0.5"],
    ),
    "veto of the wrong sign": (callback("TokenVeto", threshold=-4), ["0 < threshold < 1", "Given: -4", "logarithm"]),
    "drift of the wrong sign": (callback("OffPolicySequenceMask", delta=-0.1), ["delta > 0", "Given: -0.1"]),
    "AIS beside TIS": (
        ["--config", CORRECTIONS / "ais.yaml", "--trainer.callbacks+=TruncatedIS"],
        ["AIS and TruncatedIS both multiply", "power 2", "Keep one"],
    ),
    "choice of a callback": (
        callback("AQNNoise", schedule="cosin"),
        ["trainer.callbacks.schedule", "exponential, linear", "Given: cosin", "Did you mean 'cosine'?"],
    ),
    "option of a plugin": (plugin("QATAligned", wieghts="nvfp4"), ["no option 'wieghts'", "Did you mean 'weights'?"]),
    "noise that grows": (callback("AQNNoise", start=1e-4, end=1e-2), ["end <= start", "start = 0.0001, end = 0.01"]),
    "format of which no base is held, under an adapter": (
        plugin("NVFP4LoRA", format="bf16"),
        ["weight-only format", "fp8_row", "Given: bf16", "QATAligned"],
    ),
    "more tokens than the model has positions": (
        ["--data.max_completion_tokens", 100],
        ["at most 64 positions", "a prompt of 5 tokens and up to 100", "Lower data.max_completion_tokens"],
    ),
    "chat without a user turn": (
        chat("system"),
        [
            "Row 1 of 'system.jsonl', column 'prompt',",
            "ends with nothing to answer",
            "turns of system",
            "Correct or remove",
        ],
    ),
    "chat with an unknown role": (chat("role"), ["Turn 1 of row 1 of 'role.jsonl'", "unknown role", "mean 'user'?"]),
    "chat without turns": (chat("none"), ["Row 1 of 'none.jsonl'", "is an empty list", "role: user", "Correct or"]),
    "chat as plain text": (chat("chat", "--data.task.chat", "false"), ["is a conversation", "Leave chat out"]),
    "chat without an answering turn": (
        chat("chat", "--data.task.answer_column", "prompt"),
        ["Row 1 of 'chat.jsonl' has no answer", "last turn of role user", "Name another answer_column"],
    ),
    "option of a benchmark": (benchmark(sample=4), ["data.benchmarks", "no option 'sample'", "'samples'"]),
    "pass@k of too few samples": (
        benchmark(samples=4, pass_at=[8]),
        ["data.benchmarks: sums's pass_at is out of range", "1 to 4 samples", "Given: [8]"],
    ),
    "column of a benchmark": (benchmark(task={"prompt_column": "questions"}), ["no column 'questions'", "'question'"]),
    "nothing to evaluate on": (["--data.evaluate_task", "false"], ["nothing to evaluate on", "or a benchmark"]),
    "answers of a benchmark longer than the model": (
        benchmark(completion_tokens=100, size=1),
        ["at most 64 positions", "up to 100", "completion_tokens of the benchmark sums"],
    ),
    "only to be evaluated on": (
        ["--data.task.split", "null"],
        ["The task has no training rows", "set data.task.split"],
    ),
    "weights of a mixture": (
        ["--data.task", json.dumps({"class_path": "Mixture", "init_args": {"tasks": [SUMS], "weights": [1, 2]}})],
        ["weights of a mixture do not fit its tasks", "1 positive numbers", "[1.0, 2.0]"],
    ),
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
    shape = {"model_type": "qwen3", "vocab_size": 24, "hidden_size": 64, "num_hidden_layers": 2}
    policies = {
        "other": {**shape, "hidden_size": 32, "adapter": None, "rank": None},
        "foreign": None,
    }
    for name, policy in policies.items():
        torch.save({"state_dict": {}, **({} if policy is None else {"policy": policy})}, tmp_path / f"{name}.ckpt")


@pytest.mark.parametrize("name", KNOWN_BEFORE_A_MODEL)
def test_what_is_known_before_a_model_is_loaded(name, run, files, tmp_path):
    args, words = KNOWN_BEFORE_A_MODEL[name]
    refused(run(*args), *words)
    assert not (tmp_path / "run" / "metrics.csv").exists()


@pytest.mark.parametrize(
    ("library", "task"),
    [
        ("reasoning_gym", {"class_path": "ReasoningGym", "init_args": {"task": "chain_sum"}}),
        ("verifiers", {"class_path": "Environment", "init_args": {"env": "wordle"}}),
    ],
)
def test_an_extra_that_is_missing_is_named_with_its_command(library, task, run, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    name = f"needs the library {library.replace('_', '-')}"
    refused(run("--data.task", json.dumps(task)), name, "pip install 'lit-qrl[environments]'")


# ---------------------------------------------------------------------------------------------- known with the model


LORA = ["--model.policy.lora", "peft.LoraConfig", "--model.policy.lora.target_modules", "all-linear"]
KNOWN_WITH_A_MODEL = {
    "a packed base without an adapter": (
        plugin("NVFP4LoRA"),
        ["NVFP4LoRA freezes the base", "peft.LoraConfig", "or use QATAligned"],
    ),
    "NaN in a weight": (
        ["--model.policy.model", "nan"],
        ["model.layers.1.self_attn.k_proj.weight holds NaN or inf", "Take another checkpoint"],
    ),
    "NaN in a weight that is packed": (
        ["--model.policy.model", "nan", *plugin("NVFP4LoRA"), *LORA],
        ["model.layers.1.self_attn.k_proj.weight", "NaN or inf"],
    ),
}


@pytest.mark.parametrize("name", KNOWN_WITH_A_MODEL)
def test_what_is_known_with_the_model_comes_before_anything_is_drawn(name, run, files, tmp_path):
    args, words = KNOWN_WITH_A_MODEL[name]
    result = run(*args)
    refused(result, *words, loaded=result[2])  # a packed base is read from the folder itself
    assert not (tmp_path / "run" / "samples.jsonl").exists()


# ------------------------------------------------------------------------------------------- known in the run alone


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (ShortReward, ["'ShortReward'", "wrong number of scores", "Expected: 16", "Given: 1"]),
        (HangingReward, ["'HangingReward'", "not done within 0.2 s", "raise its `time_limit`"]),
        (few, ["'few' (function tests.test_bad_input.few)", "wrong number of scores", "Expected: 16", "Given: 1"]),
        (raising, ["function tests.test_bad_input.raising", "TypeError", "test_bad_input.py, line", "concurrency: 1"]),
    ],
)
def test_a_reward_that_breaks_its_contract_ends_the_run_with_its_report(cls, words, run, tmp_path):
    refused(run(*reward(cls)), *words, loaded=True)
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


def stopped(result, *words):
    status, text, _ = result
    assert status == 70
    assert "Traceback" not in text
    paragraph = text[text.index("lit-qrl: ") :]
    for word in words:
        assert word in paragraph, paragraph


def test_a_publish_that_did_not_arrive_ends_the_run_with_its_report(run, garbled, tmp_path):
    garbled(first=1)
    folder = tmp_path / "run"
    result = run("--trainer.max_epochs", 3, "--publisher.format", "fp8_row")
    report, checkpoint = folder / "report" / "index.html", folder / "checkpoints" / "last.ckpt"
    faults = [f"publish 1 did not arrive as sent. different: {NORM} differs from what was sent."]
    shown = (str(one.relative_to(tmp_path)) for one in (report, checkpoint))  # the working directory
    stopped(result, *faults, "publisher.on_fault: retry", *shown)
    assert report.exists()
    kinds = [event["kind"] for event in read_jsonl(folder / EVENTS_FILE)]
    assert kinds[0] == "start"
    assert kinds[-2:] == ["publish_fault", "exception"]


def test_a_publish_that_lacks_a_tensor_is_refused_in_one_paragraph(run, monkeypatch, tmp_path):
    original = TransformersEngine.load_weights

    def lossy(engine, tensors, format, version):
        return original(engine, (pair for pair in tensors if pair[0] != NORM), format, version)

    monkeypatch.setattr(TransformersEngine, "load_weights", lossy)
    stopped(run(), "publish is incomplete: 1 of", NORM, "on_publish", "No checkpoint had been written.")
    assert (tmp_path / "run" / "report" / "index.html").exists()


def test_a_policy_that_leaves_out_a_layer_is_refused_in_one_paragraph(run, monkeypatch):
    original = CausalPolicy.named_weights

    def lossy(policy):
        return (pair for pair in original(policy) if "layers.1.self_attn.v_proj" not in pair[0])

    monkeypatch.setattr(CausalPolicy, "named_weights", lossy)
    result = run("--publisher.format", "fp8_row")
    stopped(result, "publish that was refused. The stream of weights is incomplete", "layers.1.self_attn.v_proj")


def test_weights_that_are_no_numbers_any_more_end_the_run_in_one_paragraph(run, tmp_path):
    report = tmp_path / "run" / "report" / "index.html"
    result = run(*callback("tests.test_bad_input.Bursting"), "--trainer.max_epochs", 2)
    stopped(result, f"The run was stopped. {NORM} holds NaN or inf", "lower the learning rate", "run/report/index.html")
    assert report.exists()


def test_an_adapter_that_is_no_number_any_more_is_refused_by_the_sender(run, tmp_path):
    lora = [*LORA, "--publisher.lora", "adapter"]
    result = run(*callback("tests.test_bad_input.Bursting"), *lora, "--trainer.max_epochs", 2)
    stopped(result, "publish 1 did not arrive as sent. non_finite: ", "lora_B", "lower the learning rate")


def test_an_evaluation_whose_publish_fails_ends_the_same(run, garbled):
    garbled(first=0)
    stopped(run("--trainer.limit_val_batches", 1), "publish before the first iteration", NORM, "run/report/index.html")


class Emptying(RLCallback):
    """Leaves no log-prob of a rollout finite."""

    def on_rollout_end(self, trainer, module, batch):
        batch.sampler_logprobs.fill_(float("nan"))


def test_a_run_that_the_guard_stops_is_no_bad_input(run, tmp_path):
    result = run(*callback("tests.test_bad_input.Emptying"))
    stopped(result, "stopped by the guard: ", "had a non-finite log-prob", "No checkpoint had been written.")
    assert (tmp_path / "run" / "report" / "index.html").exists()


def test_an_adapter_is_trained_without_a_warning_of_settings_that_nobody_gave(run, recwarn, tmp_path):
    assert run(*LORA)[0] == 0
    export(tmp_path / "run", output=tmp_path / "out")
    assert not [warning for warning in recwarn if "loftq_config" in str(warning.message)]


def test_long_prompts_are_dropped_with_a_count(run, caplog):
    with caplog.at_level("INFO", logger="lit_qrl"):
        status, _, _ = run("--data.max_prompt_tokens", 4)
    assert status == 0
    # Two of the twelve numbers have two digits; how many of them are held out is the seed's.
    dropped = [record.message for record in caplog.records if record.message.startswith("Dropped")]
    assert dropped
    assert all("prompts over 4 tokens" in message for message in dropped)


def test_a_checkpoint_of_the_same_model_is_taken(run, tmp_path, monkeypatch):
    assert run()[0] == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    status, text, _ = run("--ckpt_path", checkpoint, "--trainer.max_epochs", 2)
    assert (status, "lit-qrl:" in text) == (0, False)
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 2
    refused(
        run("--ckpt_path", checkpoint), "has had 2 iterations already", "max_epochs above 2", "Given: 1", loaded=True
    )
    said = []
    monkeypatch.setattr("lit_qrl.cli.training.say", said.append)
    assert run("--ckpt_path", checkpoint, "--trainer.max_epochs", 2)[0] == 0
    assert "The run has had its 2 iterations. To go on, raise trainer.max_epochs, which counts them too." in said


def test_a_metric_that_early_stopping_does_not_find_is_one_paragraph(run):
    stopping = callback("lightning.pytorch.callbacks.EarlyStopping", monitor="reward/meen")
    refused(run(*stopping), "metric `reward/meen` which is not available", "`reward/mean`", loaded=True)


def test_python_raises_what_the_command_line_prints():
    with pytest.raises(ValueError, match="saturation > 0"):
        AIS(saturation=0.0)
