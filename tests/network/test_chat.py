import pytest

from lit_qrl.errors import ConfigError
from lit_qrl.network.chat import chat_ids
from tests.networks import build_tokenizer

MESSAGES = [[{"role": "user", "content": "12"}]]
# As Qwen3's: an empty block of thought where thinking is switched off, nothing where it is on or not said.
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    "{% if enable_thinking is defined and enable_thinking is false %}0{% endif %}"
)


@pytest.fixture
def tokenizer():
    made = build_tokenizer(pad_token="<pad>", eos_token="<eos>")
    made.chat_template = TEMPLATE
    return made


def test_thinking_can_be_switched_off(tokenizer):
    (plain,) = chat_ids(tokenizer, MESSAGES, {}, "x")
    assert tokenizer.decode(plain).replace(" ", "") == "12="
    assert chat_ids(tokenizer, MESSAGES, {"enable_thinking": True}, "x") == [plain]
    (off,) = chat_ids(tokenizer, MESSAGES, {"enable_thinking": False}, "x")
    assert off[:-1] == plain
    assert tokenizer.decode(off[-1:]) == "0"


def test_an_argument_of_the_library_s_own_is_passed_on(tokenizer):
    (whole,) = chat_ids(tokenizer, MESSAGES, {}, "x")
    assert chat_ids(tokenizer, MESSAGES, {"max_length": 2, "truncation": True}, "x") == [whole[:2]]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("enable_thinkin", "Did you mean 'enable_thinking'"),
        ("reasoning_effort", "Remove it"),
        ("tokenize", "Did you mean|Remove it"),
    ],
)
def test_an_argument_that_the_template_would_ignore_is_refused(tokenizer, name, remedy):
    with pytest.raises(ConfigError, match=f"does not know the argument '{name}'.*{remedy}"):
        chat_ids(tokenizer, MESSAGES, {name: False}, "x")


def test_templates_by_name(tokenizer):
    tokenizer.chat_template = {"default": TEMPLATE, "other": "{{ loud }}"}
    assert chat_ids(tokenizer, MESSAGES, {"enable_thinking": True}, "x") == chat_ids(tokenizer, MESSAGES, {}, "x")
