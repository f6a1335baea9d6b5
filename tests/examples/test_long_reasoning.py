import math

import pytest
import torch
from torch.nn import functional as F

from lit_qrl.data.tasks.generated import is_held_out
from tests.examples.scripts import importing, write_run


@pytest.fixture
def example():
    with importing("long_reasoning", "evidence_study", "", "mismatch_dial", "tiny_model") as module:
        yield module


def test_the_answer_is_the_sum_of_the_numbers(example):
    task = example("addition").ColumnSum(numbers=5, digits=4, train_size=20, evaluation_size=5)
    for row in [*task.train_rows(), *task.evaluation_rows()]:
        numbers = [int(text[::-1]) for text in row["numbers"].split(",")]
        assert len(numbers) == 5
        assert int(task.reference(row)[::-1]) == sum(numbers) % 10_000
    assert {is_held_out(row["numbers"]) for row in task.evaluation_rows()} == {True}
    assert {is_held_out(row["numbers"]) for row in task.train_rows()} == {False}


def test_the_teacher_writes_the_task_and_its_totals(example):
    addition, warm = example("addition"), example("warm_start")
    recipe = warm.Recipe(numbers=4, digits=3)
    tokenizer = warm.build_tokenizer(addition.CHARACTERS)
    for held_out in (False, True):
        tokens, labels = warm.Teacher(recipe, tokenizer, held_out, seed=1).batch(40)
        for ids, wanted in zip(tokens.tolist(), labels.tolist(), strict=True):
            problem, _, trace = tokenizer.decode(ids).partition(":")
            assert trace == addition.running_totals(problem) + "<eos>"
            assert is_held_out(problem) == held_out
            assert wanted == [-100] * 16 + ids[16:]


def test_accuracy_is_the_probability_of_a_whole_trace(example):
    addition, warm = example("addition"), example("warm_start")
    recipe = warm.Recipe(numbers=2, digits=2, hidden=128, layers=1, intermediate=128)
    tokenizer = warm.build_tokenizer(addition.CHARACTERS)
    network = warm.build_network(recipe, tokenizer)
    tokens, labels = warm.Teacher(recipe, tokenizer, True, seed=0).batch(3)
    expected = 0.0
    for row in tokens:
        log_probs = F.log_softmax(network(input_ids=row[None]).logits[0], -1)
        expected += math.exp(sum(log_probs[at - 1, row[at]].item() for at in range(6, 12)))
    assert warm.evaluate(network, tokens, labels) == pytest.approx(expected / 3, rel=1e-4)


def test_the_dial_moves_the_quantized_policy_alone(example, tmp_path):
    warm, arms, probe = example("warm_start"), example("arms"), example("probe")
    recipe = warm.Recipe(numbers=2, digits=2, hidden=128, layers=1, intermediate=128, batch=4, max_steps=10)
    warm.build(tmp_path / "policy", recipe, "cpu")
    arms.make_models(tmp_path / "policy", tmp_path)
    found = probe.probe(tmp_path / "models", ["s1", "s8"], "cpu", recipe)
    assert found["s1"]["bf16_log_ratio"] == found["s8"]["bf16_log_ratio"] == 0.0
    assert found["s8"]["bf16_solved"] == pytest.approx(found["s1"]["bf16_solved"], rel=1e-5)
    assert found["s8"]["int4_group_log_ratio"] > 2 * found["s1"]["int4_group_log_ratio"] > 0.0
    # what the policy solves is what its maker says, rounding to bf16 apart
    network = probe.AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32)
    tokenizer = warm.build_tokenizer(example("addition").CHARACTERS)
    batch = warm.Teacher(recipe, tokenizer, True, seed=0).batch(warm.CHECKED)
    assert found["s1"]["bf16_solved"] == pytest.approx(warm.evaluate(network, *batch), rel=1e-5)
    assert probe.choose({name: {"int4_group_solved": 0.0} for name in arms.SCALES}) == "s1"


def finish(arms, job, accuracies, reward):
    """Write the folder that a run would leave which was evaluated every second iteration, and before the first."""
    rows = [{"epoch": -1, "val/accuracy": accuracies[0]}]
    for at in range(2 * len(accuracies) - 2):
        row = {"epoch": at, "reward/mean": reward, "mismatch/abs_log_ratio": 0.1 * (at + 1)}
        rows.append(row | ({"val/accuracy": accuracies[(at + 1) // 2]} if at % 2 else {}))
    write_run(job, arms.studies.record, rows)


def test_the_pilot_chooses_the_rate_at_which_a_bf16_sampler_gets_furthest(example, tmp_path):
    arms = example("arms")
    ends = {1e-5: [0.5, 0.6, 0.7, 0.8], 1e-4: [0.5, 0.9, 0.1, 0.0], 1e-6: [0.5, 0.51, 0.52, 0.52]}
    for rate, job in arms.pilot_jobs(tmp_path, list(ends), []).items():
        assert job.arguments[job.arguments.index("--model.optimizer.init_args.lr") + 1] == f"{rate:g}"
        finish(arms, job, ends[rate], 0.5)
    assert arms.piloted(tmp_path, list(ends), [], "", 0.0) == 1e-5
    # what was found is kept
    (tmp_path / "pilot").rename(tmp_path / "elsewhere")
    assert arms.piloted(tmp_path, list(ends), [], "", 0.0) == 1e-5


def test_runs_are_compared_where_both_were_evaluated(example, tmp_path, capsys):
    arms = example("arms")
    names = (arms.CONTROL, "s8+tis+int4")
    for job in arms.jobs_of(tmp_path, names, (0, 1), []):
        # what was cut has an evaluation less; the other goes on to where nobody can follow
        accuracies = [0.5, 0.6, 0.7, 0.9] if job.arm == arms.CONTROL else [0.5, 0.5, 0.4 + 0.1 * job.seed]
        finish(arms, job, accuracies, 0.8 if job.arm == arms.CONTROL else 0.5)
    assert arms.main(["--report", "--out", str(tmp_path), "--arms", *names, "--seeds", "0", "1"]) == 0
    cells = [cell.strip() for cell in capsys.readouterr().out.splitlines()[-1].strip("|").split("|")]
    assert cells[:3] == ["s8+tis+int4", "2", "4"]
    assert cells[3].startswith("0.15")  # of the iterations 1 and 2
    # (0.5 + 0.4) / 2 and (0.5 + 0.5) / 2 against (0.6 + 0.7) / 2
    assert cells[8] == "-0.175 ± 0.025"
    assert cells[10].startswith("-0.300")
    # the only arm of INT4, so that nothing is adjusted; one degree of freedom: 1 − 2 / π · arctan(0.175 / 0.025)
    assert cells[11:] == [f"{1 - 2 / math.pi * math.atan(7.0):.2g}", "–", "–"]
    assert (tmp_path / "results" / "figure.png").read_bytes().startswith(b"\x89PNG")
    figure, rows = example("figure"), arms.read(tmp_path / "results" / "curves.csv")
    # means of both seeds, where both were evaluated
    assert figure.means(rows, "learner")["s8+tis+int4"] == [(0, 0.5), (2, 0.5), (4, pytest.approx(0.45))]
    # what an earlier call has is not run again, and stays in the table
    before = ["--before", str(tmp_path / "results"), "--out", str(tmp_path / "b"), "--arms", *names]
    assert arms.main(["--list", *before, "--seeds", "0", "1"]) == 0
    assert capsys.readouterr().out == ""
