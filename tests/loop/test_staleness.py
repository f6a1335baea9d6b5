from types import SimpleNamespace

import pytest
import torch

from lit_qrl.loop.contracts import PendingRollout
from lit_qrl.loop.schedule import moved_since, note_staleness
from lit_qrl.types import Completion


@pytest.mark.parametrize(("count", "length", "scored"), [(64, 10, 32), (64, 500, 4), (64, 5000, 2), (1, 5000, 1)])
def test_staleness_is_measured_on_as_many_sequences_as_take_little_time(count, length, scored):
    asked = []

    def score(sequences):
        asked.extend(sequences)
        return [torch.zeros(len(one)) for one in sequences]

    values, data = {}, SimpleNamespace(temperature=1.0, sampling=SimpleNamespace(truncated=False), group_size=1)
    data.engine = SimpleNamespace(score=score)
    metrics = SimpleNamespace(values=lambda name, tensor: values.update({name: len(tensor)}))
    one = Completion(token_ids=[3] * (length - 4), logprobs=[0.0] * (length - 4), finish_reason="length", version=0)
    draft = PendingRollout(1, 0, 0, [SimpleNamespace(prompt_ids=[1] * 4)] * count, [one] * count)
    learner = SimpleNamespace(data=data, iteration=SimpleNamespace(metrics=metrics))
    note_staleness(learner, lambda: moved_since(learner, draft))
    assert [len(one) for one in asked] == [length] * scored
    assert set(values.values()) == {scored * (length - 4)}
