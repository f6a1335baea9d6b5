"""What objects refuse as soon as they are made; what the command line says of the same: tests/test_bad_input.py."""

from pathlib import Path

import pytest
import torch

from lit_qrl import callbacks, rewards
from lit_qrl.callbacks.progress import RLProgress
from lit_qrl.callbacks.publisher import WeightPublisher
from lit_qrl.callbacks.report import Report
from lit_qrl.data import tasks
from lit_qrl.data.module import RolloutDataModule
from lit_qrl.errors import ConfigError
from lit_qrl.loop.schedule import schedule_of
from lit_qrl.module import GRPOModule
from lit_qrl.objective import DAPO
from lit_qrl.policy import CausalPolicy
from lit_qrl.rollout import DiffusionEngine, TransformersEngine
from lit_qrl.strategies import ShardedStrategy
from tests.loop.test_turns import Echo
from tests.tiny_run import DigitTask

MODEL = Path(__file__).parents[1] / "models" / "tiny-countdown"
POLICY, STEPS = CausalPolicy(str(MODEL)), torch.optim.SGD([torch.zeros(1)])
NAN, INFINITE = float("nan"), float("inf")
REFUSED = {
    callbacks.AIS: [
        ({"tolerance": -1.0}, "tolerance"),
        ({"sensitivity": -1.0}, "sensitivity"),
        ({"eps": 0.0}, "eps"),
        ({"level": "geometric"}, "level"),
        ({"scope": "mini_batch"}, "Did you mean 'minibatch'"),
    ],
    callbacks.AQNNoise: [
        ({"start": -1e-2, "end": -2e-2}, r"AQNNoise\.start .*Given: -0\.01"),
        ({"start": NAN}, r"AQNNoise\.start .*Given: nan"),
        ({"start": INFINITE}, r"AQNNoise\.start .*Given: inf"),
        ({"num_stages": 1}, "num_stages"),
    ],
    callbacks.TruncatedIS: [
        ({"lower": -0.5}, "lower"),
        ({"upper": "auto"}, "level: sequence"),
        ({"upper": "big", "level": "sequence"}, "number or auto"),
        ({"level": "sequence", "upper": "auto", "lower": 2.0}, "lower"),
        ({"level": "group"}, "level of TruncatedIS"),
    ],
    callbacks.MaskedIS: [({"level": "word"}, "level of MaskedIS")],
    callbacks.MemoryLimit: [({"gib": 0.0}, "above 0")],
    callbacks.RouterReplay: [
        ({"level": "sampler"}, "level of RouterReplay"),
        ({"compare_every": -1}, "0 or more"),
        ({"level": "old", "compare_every": 5}, "0 with level: old"),
    ],
    callbacks.RouterShift: [({"floor": floor}, r"number in \(0, 1\]") for floor in (0.0, 1.5)],
    callbacks.Guard: [
        ({"patience": 0}, "guard.patience"),
        ({"ess_floor": 1.5}, "guard.ess_floor"),
        ({"kl_ceiling": -1.0}, "guard.kl_ceiling"),
        ({"max_nonfinite_fraction": 2.0}, "guard.max_nonfinite_fraction"),
        ({"action": "revert"}, r"revert has no limit.*kl_ceiling or guard\.ess_floor"),
    ],
    Report: [({name: -1}, f"report.{name}") for name in ("every_n_iterations", "samples_per_iteration")],
    RLProgress: [({name: 0}, "positive") for name in ("header_every", "refresh_per_second")],
    WeightPublisher: [
        *(({name: -1}, name) for name in ("every_n_iterations", "probe_every", "max_restarts")),
        ({"format": "fp8_rows"}, "format"),
    ],
    tasks.Countdown: [({"count": 1}, "count"), ({"max_number": 0}, "max_number"), ({"max_target": 0}, "max_target")],
    tasks.PrefixSum: [({"digits": 1}, r"digits is too small.*2 or more")],
    tasks.Sudoku: [({"empty": empty}, "empty") for empty in (0, 13)],
    tasks.ReasoningGym: [({"task": "chain_sum", "evaluation_size": 0}, "evaluation_size is too small")],
    tasks.DatasetTask: [
        ({"path": "a.jsonl", **given}, said)
        for given, said in (
            ({"evaluation_size": 0}, "evaluation_size"),
            ({"answer_pattern": "("}, "not a regular expression"),
            ({"answer_pattern": "####"}, "not one group"),
            ({"rewards": []}, "no reward"),
            ({"rewards": [rewards.MathReward(), rewards.MathReward()]}, "both named 'math'"),
            ({"subset": []}, "empty list"),
        )
    ],
    tasks.Mixture: [
        ({"tasks": []}, "A mixture has no task"),
        ({"tasks": [tasks.Countdown(), tasks.Countdown()]}, r"cannot be told apart.*countdown, countdown.*`name`"),
        *(({"tasks": [tasks.Countdown()], "weights": [bad]}, "do not fit") for bad in (0.0, NAN)),
    ],
    Echo: [({name: 0}, f"Echo's {name} is") for name in ("max_turns", "time_limit", "max_message_tokens")],
    rewards.MathReward: [({name: bad}, name) for name, bad in (("timeout", 0.0), ("timeout", -1.0), ("workers", -1))],
    rewards.FormatReward: [({"tags": []}, "tags"), ({"tags": ["<think>"]}, "tags"), ({"pattern": "("}, "pattern")],
    rewards.FunctionReward: [
        *(({"function": len, name: -1}, f"{name} of Reward 'len'") for name in ("concurrency", "retries", "timeout")),
        ({"function": len, "time_limit": 0.0}, "time_limit of Reward 'len'"),
    ],
    RolloutDataModule: [
        ({"task": DigitTask(), "engine": TransformersEngine(), **given}, said)
        for given, said in (
            *(({name: 0}, rf"data\.{name} is too small.*at least 1") for name in ("group_size", "passes")),
            ({"temperature": 0.0}, r"data\.temperature must be positive.*data\.evaluation_temperature: 0"),
            ({"evaluation_samples": 0, "evaluation_greedy": False}, "_samples .*0 and evaluation_greedy: true"),
            *(
                ({name: 0.0}, rf"data\.{name} is out of range.*\(0, 1\]\. Given")
                for name in ("top_p", "evaluation_top_p")
            ),
            ({"top_p": 1.1}, r"data\.top_p is out of range"),
            ({"evaluation_temperature": -1.0}, r"data\.evaluation_temperature is out of range.*greedy"),
            ({"evaluation_completion_tokens": -1}, r"data\.evaluation_completion_tokens is out of range"),
            ({"evaluation_limit": -1}, r"data\.evaluation_limit is too small"),
            ({"prompts_per_iteration": 4, "group_size": 4, "micro_batches": 3}, r"divisor of its 16 sequences"),
            ({"engine": TransformersEngine}, r"data\.engine is no object\. .*Given: class TransformersEngine"),
            ({"engine": None}, r"data\.engine is no object\. .*Given: None"),
            ({"task": "rows.jsonl"}, r"data\.task is no object\. .*'rows.jsonl'"),
            ({"reward_weights": {"digit": 0.25}}, r"Did you mean 'digits'\?"),
        )
    ],
    GRPOModule: [
        ({"policy": CausalPolicy}, r"model\.policy is no object\. .*Given: class CausalPolicy"),
        ({"policy": "models/tiny"}, r"model\.policy is no object\. .*CausalPolicy\(.*Given: 'models/tiny'"),
        ({"policy": POLICY, "objective": "GRPO"}, r"model\.objective is no object\. .*GRPO\(\).*'GRPO'"),
        ({"policy": POLICY, "objective": DAPO}, r"model\.objective is no object\. .*class DAPO"),
        (
            {"policy": POLICY, "optimizer": STEPS},
            r"model\.optimizer has its parameters already.*partial\(.*an object of SGD",
        ),
    ],
    # a word that no parser has looked at is not taken for another
    schedule_of: [({"schedule": "asynch", "max_staleness": 1}, "data.schedule is unknown")],
    ShardedStrategy: [({"compute_dtype": "bfloat16"}, "compute_dtype is unknown")],
    TransformersEngine: [
        ({"share": "often"}, "share is unknown"),
        ({"dtype": "fp8"}, "dtype is unknown"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype is unknown"),
    ],
    DiffusionEngine: [({"reuse": "all"}, "reuse is unknown")],
}
for kind in (tasks.Countdown, tasks.PrefixSum, tasks.Sudoku):
    for name, bad in (("train_size", 0), ("evaluation_size", 0), ("prompt_format", "long")):
        REFUSED[kind].append(({name: bad}, f"{kind.__name__}'s {name}"))


@pytest.mark.parametrize(
    ("kind", "given", "said"), [(kind, *case) for kind, cases in REFUSED.items() for case in cases]
)
def test_arguments_are_checked_when_an_object_is_made(kind, given, said):
    with pytest.raises(ValueError if kind is RLProgress else ConfigError, match=said):
        kind(**given)
