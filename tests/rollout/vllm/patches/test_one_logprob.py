import copy

import pytest
import torch

from lit_qrl.rollout.vllm.patches import one_logprob

pytestmark = pytest.mark.vllm


def originals():
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsTensors

    def plain(function):
        return getattr(function, "lit_qrl_original", function)

    return plain(LogprobsTensors.tolists), plain(LogprobsProcessor._update_sample_logprobs)


def tensors(rows, columns, starts=None):
    from vllm.v1.outputs import LogprobsTensors

    generator = torch.Generator().manual_seed(rows)
    logprobs = -torch.rand(rows, columns, generator=generator)
    words = torch.randint(50, (rows, columns), generator=generator)
    return LogprobsTensors(words, logprobs, torch.randint(9, (rows,), generator=generator), starts)


def processor(flat=True, tokenizer=None, count=0):
    from vllm.logprobs import create_sample_logprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor

    return LogprobsProcessor(tokenizer, create_sample_logprobs(flat), None, 0.0, count, None)


def taken(made, steps, read, update):
    for step in steps:
        arrays = read(step)
        for request, one in enumerate(made):
            update(one, arrays.slice_request(request, 1))
    return made


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("columns", [1, 3])
def test_requests_have_what_vllm_gives_them(flat, columns):
    read, update = originals()
    steps = [tensors(4, columns) for _ in range(3)]
    expected = taken([processor(flat, count=columns - 1) for _ in range(4)], steps, read, update)
    ours = one_logprob._lists(read), one_logprob._appended(update)
    found = taken([processor(flat, count=columns - 1) for _ in range(4)], steps, *ours)
    assert [one.logprobs for one in found] == [one.logprobs for one in expected]
    assert [one.cumulative_logprob for one in found] == [one.cumulative_logprob for one in expected]
    assert all(len(one.logprobs) == 3 for one in found)


def test_the_arrays_are_vllm_s_where_several_tokens_come_at_once():
    read, _ = originals()
    ours = one_logprob._lists(read)
    given = tensors(5, 1, [0, 2, 5])
    assert type(ours(given)) is type(read(given))
    arrays, plain = ours(tensors(5, 1)), read(tensors(5, 1))
    assert isinstance(arrays, type(plain))
    two, expected = arrays.slice_request(1, 2), plain.slice_request(1, 2)
    assert all((a == b).all() for a, b in zip(two[:3], expected[:3], strict=True))
    assert type(copy.copy(arrays.slice_request(1, 1))) is one_logprob.One
