from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lit_qrl.callbacks.report import Report, _log_ratios, _samples, token_lengths
from lit_qrl.errors import ConfigError
from lit_qrl.loop.hooks import RLCallback
from lit_qrl.report.run import Run
from lit_qrl.run.event_log import read_jsonl
from lit_qrl.run.interrupt import Interrupted
from lit_qrl.run.loggers import RunCSVLogger
from tests.callbacks.tiny_loop import COMPLETION, GROUP_SIZE, GROUPS, Module, trainer_of
from tests.networks import rollout_of
from tests.tables import csv_rows
from tests.tiny_run import DigitTask, calling, fit

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("quick_plots")]


def epochs(folder):
    return [row["epoch"] for row in csv_rows(folder / "metrics.csv") if row["reward/mean"]]


def test_a_run_leaves_samples_a_diary_and_a_page(tmp_path, capsys):
    correcting = calling(correct=lambda trainer, module, context: None)
    trainer_of(tmp_path, [correcting, RLCallback(), Report()], enable_progress_bar=False).fit(Module())
    index = tmp_path / "report" / "index.html"
    assert capsys.readouterr().out.strip().endswith(f"Report: {index}")
    assert "0.250 → 0.375" in index.read_text()
    events = read_jsonl(tmp_path / "events.jsonl")
    assert [(event["kind"], event["iteration"]) for event in events] == [("start", 0), ("finish", 3)]
    assert events[0]["corrections"] == ["Calling_correct"]
    assert events[0]["parameters"] == 3
    run = Run(tmp_path)
    assert run.status == "finished"
    assert run.correction == "Calling_correct"
    assert run.series("reward/mean").values == [0.0, 0.125, 0.25]
    assert run.accuracy.iterations == [0, 2]


def test_samples_are_the_texts_of_the_rollout(tmp_path):
    trainer_of(tmp_path, [Report(samples_per_iteration=4)], iterations=2, enable_progress_bar=False).fit(Module())
    samples = read_jsonl(tmp_path / "samples.jsonl")
    b = GROUPS * GROUP_SIZE
    assert len(samples) == 8
    for n, sample in enumerate(samples):
        row, iteration = n % 4 * b // 4, n // 4
        assert sample == {
            "iteration": iteration + 1,
            "version": iteration,
            "prompt": f"{100 * row + 1} {100 * row + 2} {100 * row + 3}",
            "completion": " ".join(str(100 * row + 51 + i) for i in range(1 + row % COMPLETION)),
            "reward": float(row),
            "answer": None,
            "parts": {"half": row / 2, "correct": float(row > 5)},
            "correct": None,
            "token_lengths": [len(str(100 * row + 51))] + [1 + len(str(100 * row + 52))] * (row % COMPLETION),
            "environment": [],
        }


def test_a_sample_has_the_gold_answer_and_its_log_ratios(tmp_path, monkeypatch):
    """Of a real loop, with learner_old's log-probs as the training forward found them."""
    monkeypatch.setattr(DigitTask, "reference", lambda self, row: {"of": row["question"]})
    seen = []

    def note(trainer, pl_module, *given):
        if trainer.is_last_batch:
            seen.append((pl_module.iteration.measured(), pl_module.iteration.problems))

    _, _, data = fit(tmp_path, callbacks=[calling(on_train_batch_end=note), Report(samples_per_iteration=3)])
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert len(samples) == 3 * len(seen)
    for n, sample in enumerate(samples):
        rollout, problems = seen[n // 3]
        row = n % 3 * len(rollout) // 3
        problem = problems[row // data.group_size]
        assert sample["prompt"] == problem.prompt_text
        assert sample["answer"] == str({"of": problem.row["question"]})
        d = rollout.learner_old_logprobs[row] - rollout.sampler_logprobs[row]
        count = int(rollout.mask[row].sum())
        assert sample["log_ratio"] == pytest.approx(d[:count].tolist(), abs=6e-5)
        assert len(sample["token_lengths"]) == count
        assert sum(sample["token_lengths"]) == len(sample["completion"])


def test_tokens_of_the_environment_are_told_apart():
    mask = torch.tensor([[True, False, False, True, False]])
    batch = rollout_of(mask, tokens=torch.tensor([[1, 2, 3, 4, 5, 6]]), prompt_length=torch.tensor([1]))
    ((row, sample),) = _samples(Module(), batch, 7, 4)
    assert (row, sample["iteration"], sample["completion"]) == (0, 7, "2 3 4 5")
    assert sample["environment"] == [[1, 3]]
    batch.learner_old_logprobs = batch.sampler_logprobs + torch.tensor([0.25, 9.0, 9.0, -0.5, 9.0])
    assert _log_ratios(batch, 0, 4) == [0.25, None, None, -0.5]


@pytest.mark.parametrize("text", ["plain", "naïve 3 × 4 → 12", "漢字 and 🙂🙂", "", "\ufffd broken"])
def test_the_lengths_of_tokens_add_up_to_the_text(text):
    """A tokenizer of bytes, whose single tokens are not always text."""
    ids = list(text.encode())
    lengths = token_lengths(lambda some: bytes(some).decode(errors="replace"), ids)
    assert len(lengths) == len(ids)
    assert sum(lengths) == len(text)
    ends = {len(text[: i + 1].encode()) for i in range(len(text))}
    if "\ufffd" not in text:
        assert {i + 1 for i, length in enumerate(lengths) if length} == ends


@pytest.mark.parametrize("wanted, written", [(0, 0), (1, 1), (12, 12), (99, 12)])
def test_the_number_of_samples(tmp_path, wanted, written):
    trainer_of(tmp_path, [Report(samples_per_iteration=wanted)], iterations=1, enable_progress_bar=False).fit(Module())
    assert len(read_jsonl(tmp_path / "samples.jsonl")) == written


@pytest.mark.parametrize(
    ("error", "raised", "status", "said"),
    [
        (RuntimeError("broken"), RuntimeError, "failed", "Stopped by an error: RuntimeError: broken"),
        (KeyboardInterrupt(), SystemExit, "interrupted", "Interrupted: KeyboardInterrupt"),
        (Interrupted(15), SystemExit, "interrupted", "Interrupted by SIGTERM."),
    ],
)
def test_an_end_before_the_end_still_has_a_report(tmp_path, capsys, monkeypatch, error, raised, status, said):
    # Lightning ignores Ctrl-C during its shutdown, for good.
    monkeypatch.setattr("signal.signal", lambda *args: None)
    with pytest.raises(raised):
        trainer_of(tmp_path, [Report()], enable_progress_bar=False).fit(Module(fail_at=2, error=error))
    assert f"Report: {tmp_path / 'report' / 'index.html'}" in capsys.readouterr().out
    run = Run(tmp_path)
    assert run.status == status
    assert run.events[-1]["iteration"] == 3
    assert run.events[-1]["message"] == said
    assert run.series("reward/mean").values == [0.0, 0.125]
    assert run.samples[-1]["iteration"] == 3


def test_a_report_that_cannot_be_made_loses_nothing(tmp_path, monkeypatch, capsys, caplog):
    def fail(*args):
        raise MemoryError("no room")

    monkeypatch.setattr("lit_qrl.callbacks.report.render", fail)
    trainer_of(tmp_path, [Report()], enable_progress_bar=False).fit(Module())
    assert "Report:" not in capsys.readouterr().out
    assert "lit-qrl report" in caplog.text
    run = Run(tmp_path)
    assert run.status == "finished"
    assert run.events[-1]["kind"] == "report"
    assert "no room" in run.events[-1]["message"]
    assert run.iterations == 3
    with pytest.raises(RuntimeError, match="the cause"):  # which the report that fails does not hide
        trainer_of(tmp_path, [Report()], enable_progress_bar=False).fit(Module(1, RuntimeError("the cause")))


def test_a_resumed_run_continues_its_files(tmp_path, monkeypatch):
    monkeypatch.setattr("signal.signal", lambda *args: None)
    saving = {"enable_checkpointing": True, "enable_progress_bar": False}
    checkpoint = ModelCheckpoint(tmp_path / "checkpoints", filename="last", save_on_train_epoch_end=True)
    with pytest.raises(SystemExit):
        trainer_of(tmp_path, [Report(), checkpoint], 5, **saving).fit(Module(fail_at=2, error=KeyboardInterrupt()))
    assert Run(tmp_path).samples[-1]["iteration"] == 3
    trainer_of(tmp_path, [Report()], 4, **saving).fit(Module(), ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    run = Run(tmp_path)
    assert epochs(tmp_path) == ["0", "1", "2", "3"]
    assert sorted({sample["iteration"] for sample in run.samples}) == [1, 2, 3, 4]
    assert len(run.samples) == 16
    assert run.accuracy.iterations == [0, 2, 4]
    assert [event["kind"] for event in run.events] == ["start", "interrupt", "resume", "finish"]
    assert run.events[2]["iteration"] == 2


def test_a_second_run_in_the_same_folder_puts_the_first_aside(tmp_path):
    for iterations in (3, 1):
        trainer_of(tmp_path, [Report()], iterations, enable_progress_bar=False).fit(Module())
    assert epochs(tmp_path) == ["0"]
    assert {"metrics.1.csv", "samples.1.jsonl"} <= {path.name for path in tmp_path.iterdir()}
    assert len(read_jsonl(tmp_path / "samples.1.jsonl")) == 12


def test_the_text_of_a_token_is_asked_for_once():
    asked = []

    def decode(ids):
        asked.append(tuple(ids))
        return bytes(ids).decode(errors="replace")

    texts = {}
    assert token_lengths(decode, [*b"abab"], texts) == token_lengths(decode, [*b"abab"], texts) == [1] * 4
    assert sorted(asked) == [(97,), (97, 98, 97, 98), (97, 98, 97, 98), (98,)]


@pytest.mark.parametrize(("every", "begun"), [(0, []), (1, [1, 2]), (2, [2])])
def test_the_report_between_iterations_is_made_apart(tmp_path, monkeypatch, caplog, every, begun):
    seen, ended = [], []

    def page_apart(folder):
        seen.append(Run(folder).iterations)
        return SimpleNamespace(
            poll=lambda: 1, returncode=1, kill=lambda: ended.append(len(seen)), wait=lambda *seconds: 1
        )

    monkeypatch.setattr("lit_qrl.callbacks.report._page_apart", page_apart)
    monkeypatch.setattr("lit_qrl.callbacks.report.render", lambda folder: seen.append(Run(folder).iterations))
    trainer_of(tmp_path, [Report(every_n_iterations=every)], 3, enable_progress_bar=False).fit(Module())
    # Each sees the iterations that are done, the last of them included.
    assert seen == [*begun, 3]
    assert ended == [len(begun)] * bool(begun)  # before the last one is made, by the run itself
    assert ("A report could not be made" in caplog.text) == (len(begun) == 2)


def test_metrics_are_there_with_any_logger(tmp_path):
    trainer = trainer_of(tmp_path, [Report()], logger=CSVLogger(tmp_path / "other"), enable_progress_bar=False)
    trainer.fit(Module())
    assert isinstance(trainer.loggers[-1], RunCSVLogger)
    assert epochs(tmp_path) == ["0", "1", "2"]


@pytest.mark.parametrize("trial", [True, False])
def test_a_trial_run_and_an_evaluation_alone_leave_nothing(tmp_path, trial):
    trainer = trainer_of(tmp_path, [Report()], enable_progress_bar=False, fast_dev_run=trial)
    trainer.fit(Module()) if trial else trainer.validate(Module(), verbose=False)
    assert not (tmp_path / "events.jsonl").exists()
    assert not (tmp_path / "report").exists()


def test_a_wrong_configuration_makes_no_report(tmp_path):
    def refuse(trainer, pl_module, stage):
        raise ConfigError("No.")

    with pytest.raises(ConfigError):
        trainer_of(tmp_path, [Report(), calling(setup=refuse)], enable_progress_bar=False).fit(Module())
    assert list(tmp_path.iterdir()) == []
