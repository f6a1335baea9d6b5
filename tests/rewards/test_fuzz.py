"""No answer makes a reward that ships raise; `benchmarks/fuzz_rewards.py` tries as many as wanted, and their time."""

import importlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_qrl.rewards import Sample


@pytest.fixture(scope="module")
def fuzz():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        module = importlib.import_module("fuzz_rewards")
    shipped = module.rewards()
    yield module, shipped
    for reward in shipped:
        reward.close()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_answer_makes_a_reward_raise(fuzz, data):
    module, shipped = fuzz
    pieces = st.one_of(st.sampled_from(module.GOLDS + module.SEEDS), st.text(max_size=20))
    text = "".join(data.draw(st.lists(pieces, max_size=6)))
    for nest in data.draw(st.lists(st.sampled_from(module.NESTS), max_size=3)):
        text = nest.format(text, text)
    completion = data.draw(st.sampled_from(module.WRAPS)).format(text)
    columns = {**module.COLUMNS, "answer": "#### 7"}
    sample = Sample("", completion, data.draw(st.sampled_from(module.GOLDS)), columns, module.EPISODE)
    told = []
    for reward in shipped:
        module.seconds(reward, [sample], told, again=0)
    assert told == []
