import logging
import warnings

from lit_qrl.run.quiet import quiet


def test_advice_is_silenced_and_other_warnings_are_not():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        quiet()
        warnings.warn("The 'val_dataloader' does not have many workers which may be a bottleneck.")
        warnings.warn("The learning rate is 1000.")
    assert [str(one.message) for one in seen] == ["The learning rate is 1000."]
    assert logging.getLogger("lit_qrl").isEnabledFor(logging.INFO)
