"""Which of the library's attentions computes what a model means."""

from typing import Any

from lit_qrl.errors import ConfigError

WITHOUT_SOFTCAP = ("sdpa", "paged|sdpa")
"""Attentions that leave out a soft-cap of the scores, without a word."""


def implementation(config: Any, asked: str | None = None) -> str | None:
    """Return the attention implementation for a model; None is the library's choice.

    Args:
        config: the model's.
        asked: by the user, or None.

    Raises:
        ConfigError: for one that leaves out the soft-cap c · tanh(scores / c) of the model's attention.

    >>> from transformers import Gemma2Config, LlamaConfig
    >>> implementation(Gemma2Config()), implementation(LlamaConfig())
    ('eager', None)
    """
    softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    if not softcap:
        return asked
    if asked in WITHOUT_SOFTCAP:
        raise ConfigError(
            "This attention leaves out the soft-cap of the model's scores, so that another model would be trained.",
            expected="eager or flash_attention_2",
            given=f"model.policy.attn_implementation: {asked}, for a cap of {softcap}",
            remedy="Leave model.policy.attn_implementation out.",
        )
    return asked or "eager"
