"""A tokenizer's special tokens, and chat messages as token ids by its own template."""

import difflib
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lit_qrl.errors import ConfigError

# Said here, since a completion follows and token ids are wanted.
OURS = {"conversation", "add_generation_prompt", "tokenize", "return_dict"}


def with_special_tokens(
    tokenizer: Any, source: str, pad_token: str | None, eos_token: str | None, ends: Sequence[int] = ()
) -> Any:
    """Return a tokenizer with the padding and end token that were asked for, or its own.

    One without an end token takes the model's, and one without a padding token pads with its end token.

    Args:
        tokenizer: as it was loaded.
        source: from where, for errors.
        pad_token: instead of its own.
        eos_token: instead of its own.
        ends: ids of the model's end tokens.

    Raises:
        ConfigError: a token is not in its vocabulary, or there is no end token.
    """
    for kind, given in (("eos", eos_token), ("pad", pad_token)):
        if given is not None:
            if given not in tokenizer.get_vocab():
                raise ConfigError(
                    f"model.policy.{kind}_token is not in the tokenizer's vocabulary.",
                    expected="a token that the model knows",
                    given=repr(given),
                )
            setattr(tokenizer, f"{kind}_token", given)
    if tokenizer.eos_token_id is None and ends:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0])
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"Neither the tokenizer of {source} nor its model has an end token.",
            remedy="Set model.policy.eos_token to one from its vocabulary, or name it in tokenizer_config.json.",
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def chat_ids(
    tokenizer: Any, conversations: Sequence[Sequence[dict[str, str]]], arguments: Mapping[str, Any], source: str
) -> list[list[int]]:
    """Return the token ids of conversations, each up to where its completion begins.

    Args:
        tokenizer: with a chat template.
        conversations: messages with `role` and `content`.
        arguments: further ones of the template, such as `enable_thinking`.
        source: of the tokenizer, for errors.

    Raises:
        ConfigError: there is no template; it does not know an argument, which it would ignore without a word.
    """
    template = tokenizer.chat_template
    if not template:
        raise ConfigError(
            f"The task poses chat messages, but the tokenizer of {source} has no chat template.",
            remedy="Use an instruction-tuned model, or set data.task.chat: false (in audit --chat false).",
        )
    text = "\n".join(template.values()) if isinstance(template, dict) else template
    own = set(inspect.signature(tokenizer.apply_chat_template).parameters)
    known = (own | set(re.findall(r"[A-Za-z_]\w*", text))) - OURS
    for name in arguments:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"The chat template of {source} does not know the argument {name!r} of chat_template_args.",
                expected="a name that stands in the template",
                given=name,
                remedy=f"Did you mean {close[0]!r}?" if close else "Remove it from model.policy.chat_template_args.",
            )
    return tokenizer.apply_chat_template(
        [list(messages) for messages in conversations],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
        **arguments,
    )


ANSWER = "lit-qrl-answer"


def turn_ids(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], chat: bool
) -> list[int]:
    """Return the token ids that stand between an answer, with its stop token, and where the next answer begins.

    Args:
        tokenizer: with a chat template, where the conversation has one.
        messages: what follows the answer, with `role` and `content`.
        arguments: further ones of the template.
        chat: by the chat template; else the contents stand there as they are.
    """
    if not chat:
        return tokenizer("".join(str(message["content"]) for message in messages), add_special_tokens=False)[
            "input_ids"
        ]
    before = [{"role": "user", "content": "."}, {"role": "assistant", "content": ANSWER}]
    text = tokenizer.apply_chat_template(
        [*before, *map(dict, messages)], add_generation_prompt=True, tokenize=False, **arguments
    )
    after = text.rpartition(ANSWER)[2]
    # The answer's own stop token stands in the place of the template's.
    ends = sorted((token for token in tokenizer.all_special_tokens if after.startswith(token)), key=len)
    return tokenizer(after.removeprefix(ends[-1]) if ends else after, add_special_tokens=False)["input_ids"]
