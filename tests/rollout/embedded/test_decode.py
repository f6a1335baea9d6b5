from hypothesis import given
from hypothesis import strategies as st

from lit_qrl.rollout.embedded.decode import plan


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    n=st.integers(1, 9),
    steps=st.integers(1, 30),
    tokens=st.integers(1, 600),
    max_rows=st.none() | st.integers(1, 20),
)
def test_every_completion_is_planned_once_and_batches_fit(lengths, n, steps, tokens, max_rows):
    batches = list(plan(lengths, n, steps, tokens, max_rows))
    assert sorted(number for batch in batches for number in batch) == list(range(n * len(lengths)))
    for batch in batches:
        width = max(lengths[number // n] for number in batch)
        assert len(batch) == 1 or len(batch) * (width + steps) <= tokens
        assert max_rows is None or len(batch) <= max_rows


def test_prompts_of_similar_length_come_together():
    batches = list(plan([3, 30, 4, 29], n=2, steps=10, tokens=160, max_rows=None))
    assert batches == [[2, 3, 6, 7], [4, 5, 0, 1]]


def test_where_no_row_is_padded_the_prompts_of_a_batch_are_of_one_length():
    batches = list(plan([3, 30, 3, 29], n=2, steps=10, tokens=10_000, max_rows=None, padded=False))
    assert batches == [[2, 3], [6, 7], [0, 1, 4, 5]]
