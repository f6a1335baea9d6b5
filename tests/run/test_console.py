"""What libraries say: all of it in the run's file, errors on the screen once, nothing between the rows."""

import logging
import os
import subprocess
import sys
import warnings

import pytest
from tqdm import tqdm

from lit_qrl.rollout.vllm.process import prepare_environment
from lit_qrl.run import console
from lit_qrl.run.console import LOG_FILE, kept_from_the_screen, phase, quiet, without_bars


@pytest.fixture(autouse=True)
def no_level(monkeypatch):
    """An engine built by a test before has set a level for its process."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "")
    monkeypatch.delenv("VLLM_LOGGING_LEVEL")


def test_messages_go_to_the_file_and_errors_to_the_screen_once(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("VLLM_CONFIGURE_LOGGING", raising=False)
    vllm, pool, jit = (logging.getLogger(n) for n in ("vllm", "vllm.v1.core.block_pool", "vllm.utils.jit_monitor"))
    own = logging.StreamHandler(sys.stdout)
    vllm.addHandler(own)
    try:
        with kept_from_the_screen(tmp_path):
            assert os.environ["VLLM_CONFIGURE_LOGGING"] == "0"
            for _ in range(3):
                pool.info("Successfully reset prefix cache")
                pool.warning("The cache is %s.", "small")
            jit.warning("Triton kernel JIT compilation during inference: _kernel")
            for _ in range(2):  # said once
                try:
                    raise ValueError("not there")
                except ValueError:
                    pool.exception("It broke.")
            logging.getLogger("torch._inductor.async_compile").info("Creating a pool")  # has a handler of its own
            logging.getLogger("torch._inductor.async_compile").warning("slow")
        assert vllm.handlers == [own]
    finally:
        vllm.removeHandler(own)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "vllm: It broke.\n"
    lines = (tmp_path / LOG_FILE).read_text().splitlines()
    assert sum("Successfully reset prefix cache" in line for line in lines) == 3
    assert lines[-1].endswith(" WARNING torch._inductor.async_compile: slow")
    assert not any("Creating a pool" in line for line in lines)
    assert lines[-2] == "ValueError: not there"
    told = [line.split(" ", 2)[2] for line in lines if "vllm." in line]
    assert told[-3:] == [
        "WARNING vllm.utils.jit_monitor: Triton kernel JIT compilation during inference: _kernel",
        "ERROR vllm.v1.core.block_pool: It broke.",
        "ERROR vllm.v1.core.block_pool: It broke.",
    ]
    assert "VLLM_CONFIGURE_LOGGING" not in os.environ


def test_where_nothing_is_said_there_is_no_file(tmp_path):
    with kept_from_the_screen(tmp_path / "run"):
        logging.getLogger("vllm").debug("nothing worth a line")
    assert not list(tmp_path.iterdir())
    with kept_from_the_screen(tmp_path / "run"):
        logging.getLogger("vllm").info("a line")
    assert (tmp_path / "run" / LOG_FILE).read_text().endswith("INFO vllm: a line\n")


def test_the_level_is_the_run_s_and_not_that_of_an_engine_s_process(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for run in ("first", "second"):
        with kept_from_the_screen(tmp_path / run):
            prepare_environment(deep_gemm=False, kv_cache_gib=None)
            logging.getLogger("vllm").info("a line")
        assert (tmp_path / run / LOG_FILE).read_text().endswith("INFO vllm: a line\n")
        assert "VLLM_LOGGING_LEVEL" not in os.environ


WARNS = """
import sys, warnings
from pathlib import Path
from lit_qrl.run.console import kept_from_the_screen
from lit_qrl.run.console import quiet
import logging
quiet()
with kept_from_the_screen(Path("run")):
    warnings.warn("of the user's own code")
    warnings.warn_explicit("of a library", UserWarning, f"{sys.prefix}/lib/site-packages/torch/c10d_logger.py", 83)
    logging.getLogger("lit_qrl.functional").debug("for maintainers")
    logging.getLogger("lit_qrl.functional").info("for users")
"""


def test_warnings_of_libraries_go_to_the_file_and_the_user_s_own_stay(tmp_path):
    (tmp_path / "mine.py").write_text(WARNS)
    done = subprocess.run([sys.executable, "mine.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "of the user's own code" in done.stderr
    assert "for users" in done.stderr
    assert "of a library" not in done.stderr
    assert "for maintainers" not in done.stderr
    kept = (tmp_path / "run" / LOG_FILE).read_text()
    assert "c10d_logger.py:83: UserWarning: of a library" in kept
    assert "for maintainers" in kept


def test_bars_of_a_library_are_kept_away_and_what_it_says_is_not(capsys):
    with without_bars():
        bar = tqdm(range(3), desc="Capturing CUDA graphs", mininterval=0)
        for _ in bar:
            pass
        print("a warning", file=sys.stderr)
    print("after", file=sys.stderr)
    assert capsys.readouterr().err == "a warning\nafter\n"


SAYS = """
import sys
from pathlib import Path
from lit_qrl.run.console import kept_from_the_screen
with kept_from_the_screen(Path(sys.argv[1])):
    from vllm.logger import init_logger
    log = init_logger("vllm.v1.core.block_pool")
    log.info("Successfully reset prefix cache")
    log.warning_once("only once")
"""


@pytest.mark.vllm
def test_vllm_s_own_logging_stays_away_from_the_screen(tmp_path):
    done = subprocess.run([sys.executable, "-c", SAYS, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "Successfully" not in done.stdout + done.stderr
    assert "only once" not in done.stdout + done.stderr
    assert "only once" in (tmp_path / LOG_FILE).read_text()
    assert "Successfully reset prefix cache" in (tmp_path / LOG_FILE).read_text()


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_program_goes_on_whose_output_nobody_reads(name):
    words = f"""
import sys
from lit_qrl.run.console import outlast_readers
outlast_readers()
print("first é", file=sys.{name}, flush=True)
sys.stdin.read()  # until the reader is gone
for _ in range(3):
    print("more", file=sys.{name}, flush=True)
print("x" * 100000, file=sys.{name})
"""
    pipes = {"stdin": subprocess.PIPE, name: subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", words], **pipes) as process:
        read = getattr(process, name)
        assert read.readline().decode() == "first é\n"
        read.close()
        process.stdin.close()
        assert process.wait(60) == 0


def test_a_phase_has_a_line_with_its_seconds(monkeypatch, caplog):
    now = iter([0.0, 2.0, 60.0, 70.5, 71.0, 71.5])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(now))
    with caplog.at_level(logging.INFO, logger="lit_qrl"):
        with phase("First evaluation"):
            with phase("vLLM started"):
                pass
        with phase("too short for a line"):
            pass
    assert caplog.messages == ["vLLM started: 58.0 s", "First evaluation: 70.5 s"]


def test_advice_is_silenced_and_other_warnings_are_not():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        quiet()
        warnings.warn("The 'val_dataloader' does not have many workers which may be a bottleneck.")
        warnings.warn("The learning rate is 1000.")
    assert [str(one.message) for one in seen] == ["The learning rate is 1000."]
    assert logging.getLogger("lit_qrl").isEnabledFor(logging.INFO)


def test_a_limit_of_time_that_ends_the_run_is_told(caplog):
    quiet()
    told = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    with caplog.at_level(logging.INFO, logger=told.name):
        told.info("GPU available: False")
        told.info("Time limit reached. Elapsed time is 0:00:02. Signaling Trainer to stop.")
    assert [record.getMessage()[:4] for record in caplog.records] == ["Time"]
