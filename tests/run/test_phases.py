import logging

from lit_qrl.run import console as phases
from lit_qrl.run.console import phase


def test_a_phase_has_a_line_without_the_seconds_of_the_phases_inside_it(monkeypatch, caplog):
    now = iter([0.0, 2.0, 60.0, 70.5, 71.0, 71.5])
    monkeypatch.setattr(phases.time, "monotonic", lambda: next(now))
    with caplog.at_level(logging.INFO, logger="lit_qrl"):
        with phase("First evaluation"):
            with phase("vLLM started"):
                pass
        with phase("too short for a line"):
            pass
    assert caplog.messages == ["vLLM started: 58.0 s", "First evaluation: 12.5 s"]
