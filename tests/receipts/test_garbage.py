import gc

import pytest

from lit_qrl.receipts.garbage import young_garbage_alone


def test_all_objects_are_walked_through_by_nobody_meanwhile():
    before, walked = gc.get_threshold(), []
    assert before[2] < 1000
    gc.callbacks.append(watch := lambda phase, info: walked.append(info["generation"]))
    try:
        gc.set_threshold(5, 2, 2)
        with young_garbage_alone():
            kept = [[number] for number in range(2000)]
        assert set(walked) == {0, 1}
        assert gc.get_threshold() == (5, 2, 2)
    finally:
        gc.callbacks.remove(watch)
        gc.set_threshold(*before)
    assert len(kept) == 2000


def test_thresholds_are_what_they_were_after_an_error():
    before = gc.get_threshold()
    with pytest.raises(RuntimeError), young_garbage_alone():
        raise RuntimeError
    assert gc.get_threshold() == before
