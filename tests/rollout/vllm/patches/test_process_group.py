from lit_qrl.rollout.vllm.patches.process_group import PATCH


def test_the_end_of_an_engine_ends_no_group():
    ended = []
    (change,) = PATCH.changes.values()
    change(lambda shutdown_ray=False: ended.append(shutdown_ray))(shutdown_ray=True)
    assert not ended
