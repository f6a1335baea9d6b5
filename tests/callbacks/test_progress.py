import io
from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import ProgressBar

from lit_qrl.callbacks.progress import COLUMNS, RLProgress, cell, header, line
from tests.callbacks.tiny_loop import Module, trainer_of
from tests.tiny_run import calling

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def terminal(monkeypatch):
    """A standard output that says that it is a terminal."""

    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self):
            return True

    out = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    # Not `sys.stdout` itself, which pytest exchanges between a fixture and its test.
    monkeypatch.setattr("lit_qrl.callbacks.progress.sys", SimpleNamespace(stdout=out))
    return out


def fit(tmp_path, iterations=3, module=None, bar=None, **options):
    trainer = trainer_of(tmp_path, [bar or RLProgress()], iterations, **options)
    trainer.fit(module or Module())
    return trainer


def test_a_log_file_gets_one_line_per_iteration(tmp_path, capsys):
    trainer = fit(tmp_path)
    out = capsys.readouterr().out
    assert isinstance(trainer.progress_bar_callback, RLProgress)
    assert len([c for c in trainer.callbacks if isinstance(c, ProgressBar)]) == 1
    assert "\x1b" not in out
    assert "\r" not in out
    head, *rows = out.splitlines()
    assert " ".join(head.split()) == "iter reward accuracy greedy KL ESS α tok/s rollout score update"
    cells = [row.split() for row in rows]
    assert [row[0] for row in cells] == ["0/3", "1/3", "2/3", "3/3"]
    assert [row[1] for row in cells] == ["-", "0.000", "0.125", "0.250"]
    # Evaluated before the first iteration and after the second; the last line has the last value.
    assert [row[2] for row in cells] == ["0.250", "-", "0.375", "0.375"]
    assert [row[8] for row in cells] == ["-", "0.50s", "0.50s", "0.50s"]
    assert len({len(row) for row in [head, *rows]}) == 1


def test_the_head_is_repeated(tmp_path, capsys):
    fit(tmp_path, iterations=4, bar=RLProgress(header_every=2))
    rows = capsys.readouterr().out.splitlines()
    assert ["iter" in row for row in rows] == [True, False, False, True, False, False, True, False]


def test_the_iteration_that_failed_has_no_line_and_the_bar_stops(tmp_path, capsys, request):
    with pytest.raises(RuntimeError):
        fit(tmp_path, module=Module(fail_at=2, error=RuntimeError("broken")))
    assert [row.split()[0] for row in capsys.readouterr().out.splitlines()[1:]] == ["0/3", "1/3", "2/3"]
    request.getfixturevalue("terminal")
    bar = RLProgress()
    with pytest.raises(RuntimeError):
        fit(tmp_path, module=Module(fail_at=0, error=RuntimeError("broken")), bar=bar)
    assert bar._live is None


def test_an_iteration_that_a_limit_of_time_cuts_has_no_line_either(tmp_path, capsys):
    def over(trainer, *given):
        """What `trainer.max_time` does when it is over."""
        trainer.should_stop = trainer.current_epoch == 1

    trainer = trainer_of(tmp_path, [RLProgress(), calling(on_train_batch_end=over)], 3, limit_val_batches=0)
    trainer.fit(Module())
    assert (trainer.current_epoch, trainer.is_last_batch) == (2, False)
    assert [row.split()[0] for row in capsys.readouterr().out.splitlines()[1:]] == ["1/3"]


def test_a_resumed_run_prints_its_own_iterations_only(tmp_path, capsys):
    fit(tmp_path, iterations=2, enable_checkpointing=True)
    capsys.readouterr()
    (checkpoint,) = (tmp_path / "checkpoints").glob("*.ckpt")
    for epochs, accuracies in ((4, {"3/4": "-", "4/4": "0.625"}), (3, {"3/3": "0.375"})):  # the process before's
        trainer_of(tmp_path, [RLProgress()], epochs).fit(Module(), ckpt_path=checkpoint)
        rows = [row.split() for row in capsys.readouterr().out.splitlines()[1:]]
        assert {row[0]: row[2] for row in rows} == accuracies


def test_a_terminal_sees_generation_move(tmp_path, terminal):
    bar = RLProgress(refresh_per_second=1000)
    shown = []
    original = bar.update_generation

    def recorded(stage, done, total, tokens):
        original(stage, done, total, tokens)
        task = bar._live.tasks[-1]
        shown.append((task.description, task.completed, task.total, task.fields["note"].split(" ")[:2]))

    bar.update_generation = recorded
    fit(tmp_path, iterations=2, bar=bar)
    assert shown[:3] == [
        ("rollout", 0, 12, ["0/12", "sequences"]),
        ("rollout", 4, 12, ["4/12", "sequences"]),
        ("rollout", 8, 12, ["8/12", "sequences"]),
    ]
    assert shown[3][0] == "score"
    assert bar._live is None
    text = terminal.getvalue()
    assert "1/2  0.000" in text
    assert "2/2  0.125" in text


def test_tokens_per_second_are_those_of_this_generation(terminal, monkeypatch):
    now = iter([10.0, 12.0, 100.0, 200.0, 201.0, 202.0])
    monkeypatch.setattr("lit_qrl.callbacks.progress.time.perf_counter", lambda: next(now))
    bar = RLProgress()
    monkeypatch.setattr(bar, "_live", object())
    notes = []
    monkeypatch.setattr(bar, "_phase", lambda name, done, total, note="": notes.append((name, note)))
    bar.update_scoring("judge", 3, 8)
    assert notes.pop() == ("reward", "samples judged by judge")
    bar.update_generation("rollout", 0, 8, 50)
    bar.update_generation("rollout", 4, 8, 650)
    bar.update_generation("val", 0, 8, 0)
    bar.update_generation("val math greedy", 0, 8, 0)
    bar.update_generation("val math greedy", 7, 8, 2000)
    bar.update_generation("val math greedy", 8, 8, 2100)
    assert notes == [
        ("rollout", "sequences"),
        ("rollout", "sequences 300 tokens/s"),
        ("evaluate", "sequences"),
        ("evaluate", "sequences math greedy"),
        ("evaluate", "sequences math greedy 2,000 tokens/s"),
        ("judge", ""),
    ]


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_evaluations_alone_start_and_stop_the_bar(tmp_path, terminal, method):
    module = Module()
    module.test_step = module.predict_step = module.validation_step
    module.test_dataloader = module.predict_dataloader = module.val_dataloader
    module.validation_step = module.test_step = module.predict_step = lambda *args: seen.append(bar._live is not None)
    seen, bar = [], RLProgress()
    getattr(trainer_of(tmp_path, [bar]), method)(module)
    assert seen == [True]
    assert bar._live is None


def test_a_disabled_bar_is_silent(tmp_path, capsys):
    bar = RLProgress()
    bar.disable()
    fit(tmp_path, bar=bar)
    bar.update_generation("rollout", 1, 2, 3)
    bar.print("nothing")
    assert capsys.readouterr().out == ""
    bar.enable()
    bar.print("something")
    assert capsys.readouterr().out == "something\n"


def test_other_ranks_are_silent(tmp_path, capsys, monkeypatch):
    from lightning.pytorch import Trainer

    monkeypatch.setattr(Trainer, "is_global_zero", False)
    fit(tmp_path)
    assert capsys.readouterr().out == ""


def test_lines_fit_a_plain_terminal():
    metrics = {column.metric: value for column, value in zip(COLUMNS, [-0.5] + 9 * [123.456], strict=True)}
    for total in (5, 150, 999):
        assert len(header(total)) == len(line(total, total, metrics)) <= 80
    assert len(header(20_000)) == len(line(20_000, 20_000, metrics))
    assert line(3, None, {}).split()[0] == "3"


@pytest.mark.parametrize("kind", ["number", "small", "rate", "seconds"])
@pytest.mark.parametrize("value", [0.0, 1e-9, 0.00123, 0.4567, 9.999, 99.96, 1234.5, 7.9e7, 3e12, -0.02, -1.5e-7])
def test_cells_fit_and_mean_the_number(kind, value):
    width = 8
    text = cell(value, width, kind)
    assert len(text) <= width
    # Two digits are right, or the value is below what the column resolves.
    resolution = {"number": 1e-3, "small": 1e-5, "rate": 1.0, "seconds": 0.01}[kind]
    assert float(text.rstrip("s")) == pytest.approx(value, rel=0.5, abs=resolution)
    assert [cell(none, width, kind) for none in (None, float("nan"), -float("inf"))] == ["-", "nan", "-inf"]


def test_substitutes_for_what_is_not_logged():
    assert "0.00012" in line(1, 2, {"mismatch/kl_k1": 0.00012})
    assert "0.500" in line(1, 2, {"val/math/greedy_pass@1": 0.25, "val/math/pass@1": 0.5, "val/other/pass@1": 1.0})
    assert line(1, 2, {"val/greedy_pass@1": 0.5, "val/math/pass@1": 0.25}).split()[2:4] == ["-", "0.500"]
