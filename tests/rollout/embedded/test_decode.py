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
    planned = [(p.prompt, i) for batch in batches for p in batch for i in range(p.first, p.first + p.count)]
    assert sorted(planned) == [(prompt, i) for prompt in range(len(lengths)) for i in range(n)]
    for batch in batches:
        rows = sum(piece.count for piece in batch)
        width = max(piece.length for piece in batch)
        assert all(piece.length == lengths[piece.prompt] and piece.count > 0 for piece in batch)
        assert rows == 1 or rows * (width + steps) <= tokens
        assert max_rows is None or rows <= max_rows


def test_prompts_of_similar_length_come_together():
    batches = list(plan([3, 30, 4, 29], n=2, steps=10, tokens=160, max_rows=None))
    assert [{piece.prompt for piece in batch} for batch in batches] == [{1, 3}, {2, 0}]


def test_where_no_row_is_padded_the_prompts_of_a_batch_are_of_one_length():
    batches = list(plan([3, 30, 3, 29], n=2, steps=10, tokens=10_000, max_rows=None, padded=False))
    assert [{piece.length for piece in batch} for batch in batches] == [{30}, {29}, {3}]
    assert sorted(piece.prompt for batch in batches for piece in batch) == [0, 1, 2, 3]
