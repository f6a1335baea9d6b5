import logging
import warnings

from lit_qrl.run.console import quiet


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
