from lit_qrl.rewards import ConstantReward, Sample


def test_every_completion_scores_the_same():
    reward = ConstantReward(0.7, weight=2.0)
    assert reward([Sample("", str(i)) for i in range(3)]) == [0.7] * 3
    assert reward([]) == []
    assert (reward.weight, reward.name) == (2.0, "constant")
