"""The samples of a run as a page shows them: every iteration that fits, tokens coloured by their log-ratio."""

import re
from collections.abc import Sequence
from typing import Any

from lit_qrl.report import page
from lit_qrl.report.run import Run

CHARACTERS_SHOWN = 6000
"""Of a prompt or completion."""
PAGE_CHARACTERS = 600_000
"""Of all samples on a page, as they are written there; with more, iterations are left out evenly."""
EDGES = (0.02, 0.1, 0.5)
"""Nats: |log-ratio| from which a token has the first, second and third shade."""
STAGES = 8
"""Of the order in which a completion was unmasked."""
MARKUP = 24
"""Characters that the markup of a coloured stretch takes, about."""


def samples_section(run: Run) -> page.Section | None:
    """Return the section in which a run's samples are browsed, None without any."""
    by_iteration: dict[Any, list[dict[str, Any]]] = {}
    for sample in run.samples:
        by_iteration.setdefault(sample.get("iteration", 0), []).append(shown(sample))
    if not by_iteration:
        return None
    kept = fitting(list(by_iteration), [sum(map(_size, group)) for group in by_iteration.values()], PAGE_CHARACTERS)
    groups = [{"iteration": i, "version": _version(by_iteration[i]), "samples": by_iteration[i]} for i in kept]
    all_shown = [sample for group in groups for sample in group["samples"]]
    caption = "What the policy wrote in training, spread evenly over each iteration's prompts, not selected by reward."
    if len(kept) < len(by_iteration):
        caption += (
            f" {len(kept)} of {len(by_iteration)} iterations, so that the page stays small; samples.jsonl has all."
        )
    return page.Section(
        "samples",
        "Samples",
        "samples.html",
        caption=caption,
        groups=groups,
        count=len(all_shown),
        coloured=any("shade" in piece for sample in all_shown for piece in sample["pieces"]),
        turns=any(sample["turns"] for sample in all_shown),
        answers=any(sample["answer"] for sample in all_shown),
        edges=EDGES,
    )


def shown(sample: dict[str, Any]) -> dict[str, Any]:
    """Return what the template reads of one record of `samples.jsonl`; what is missing or odd in it is left out."""
    reward = sample.get("reward")
    value = float(reward) if isinstance(reward, (int, float)) else None
    correct = sample.get("correct")
    good = correct if isinstance(correct, bool) else None if value is None else value > 0
    parts = sample.get("parts")
    listed = parts.items() if isinstance(parts, dict) and len(parts) > 1 else ()
    answer = sample.get("answer")
    pieces = pieces_of(sample)
    return {
        "prompt": shorten(sample.get("prompt", "")),
        "pieces": pieces,
        "stages": stages_of(sample),
        "turns": any(piece["said"] for piece in pieces),
        "answer": None if answer is None else shorten(answer),
        "reward": "not scored" if reward is None else page.number(reward) if value is not None else str(reward),
        "value": value,
        "version": sample.get("version"),
        "tone": "" if good is None else "good" if good else "bad",
        "parts": [f"{name} {page.number(part) if _plain(part) else part}" for name, part in listed],
    }


def pieces_of(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a completion in stretches of text: what an environment said, and tokens by the shade of their log-ratio.

    Each has `text` and `said` (by the environment); a coloured one has `shade`, -3 to 3, and the log-ratios it is of.

    >>> sample = {"completion": "ab c", "token_lengths": [1, 1, 2], "log_ratio": [0.0, -0.3, None]}
    >>> [(piece["text"], piece.get("shade")) for piece in pieces_of(sample)]
    [('a', None), ('b', -2), (' c', None)]
    """
    text = str(sample.get("completion", ""))
    whole = text[:CHARACTERS_SHOWN]
    rest = f" … ({len(text) - len(whole)} more characters)" if len(text) > len(whole) else ""
    lengths, ratios = _numbers(sample.get("token_lengths")), _numbers(sample.get("log_ratio"))
    said = {i for start, end in _spans(sample.get("environment")) for i in range(start, min(end, len(lengths)))}
    pieces: list[dict[str, Any]] = []
    position = 0
    for i, length in enumerate(lengths):
        piece = whole[position : position + max(int(length or 0), 0)]
        position += len(piece)
        d = ratios[i] if i < len(ratios) else None
        level = 0 if d is None or i in said else sum(abs(d) >= edge for edge in EDGES) * (1 if d > 0 else -1)
        if piece:
            _add(pieces, piece, i in said, level, d)
    if whole[position:]:
        _add(pieces, whole[position:], bool(pieces) and pieces[-1]["said"] and len(lengths) - 1 in said, 0, None)
    if rest:
        _add(pieces, rest, False, 0, None)
    return pieces


def stages_of(sample: dict[str, Any]) -> list[tuple[int, str]]:
    """Return how a completion of masked diffusion came about: steps, from 1, and the text after each, `·` for masks.

    At most `STAGES` of them, evenly spread, the first and the last among them; none of other completions.

    >>> stages_of({"completion": "abc", "token_lengths": [1, 1, 1], "unmasked_at": [1, 0, 1]})
    [(1, '·b·'), (2, 'abc')]
    """
    text, lengths = str(sample.get("completion", "")), _numbers(sample.get("token_lengths"))
    when = [None if step is None else int(step) for step in _numbers(sample.get("unmasked_at"))]
    steps = sorted({step for step in when if step is not None and step >= 0})
    if len(when) != len(lengths) or not steps or len(text) > CHARACTERS_SHOWN:
        return []
    stages = []
    for step in fitting(steps, [1] * len(steps), STAGES):
        shown, position = "", 0
        for length, at in zip(lengths, when, strict=True):
            piece = text[position : position + int(length or 0)]
            position += len(piece)
            shown += piece if at is not None and at <= step else re.sub(r"[^\n]", "·", piece)
        stages.append((step + 1, shown))
    return stages


def _add(pieces: list[dict[str, Any]], text: str, said: bool, level: int, d: float | None) -> None:
    if level:
        pieces.append({"text": text, "said": said, "shade": level, "ratio": f"{d:+.3f}"})
    elif pieces and pieces[-1]["said"] == said and "shade" not in pieces[-1]:
        pieces[-1]["text"] += text
    else:
        pieces.append({"text": text, "said": said})


def fitting(keys: Sequence[Any], sizes: Sequence[int], room: int) -> list[Any]:
    """Return as many keys, evenly spread with the first and the last, as have room.

    >>> fitting([1, 2, 3, 4, 5], [10] * 5, 30), fitting([1, 2], [10, 10], 20), fitting([1, 2, 3], [99] * 3, 1)
    ([1, 3, 5], [1, 2], [3])
    """
    for count in range(len(keys), 1, -1):
        chosen = [round(i * (len(keys) - 1) / (count - 1)) for i in range(count)]
        if sum(sizes[i] for i in chosen) <= room:
            return [keys[i] for i in chosen]
    return list(keys[-1:])


def shorten(text: Any) -> str:
    """Return a text with at most `CHARACTERS_SHOWN` characters, and how many more there are."""
    text = str(text)
    cut = len(text) - CHARACTERS_SHOWN
    return text if cut <= 0 else f"{text[:CHARACTERS_SHOWN]} … ({cut} more characters)"


def _size(sample: dict[str, Any]) -> int:
    own = sum(len(piece["text"]) + (MARKUP if "shade" in piece else 0) for piece in sample["pieces"])
    own += sum(len(text) + 2 * MARKUP for _, text in sample["stages"])
    return own + len(sample["prompt"]) + len(sample["answer"] or "") + 20 * MARKUP


def _version(samples: Sequence[dict[str, Any]]) -> Any:
    return samples[0]["version"] if samples else None


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (int, float))


def _numbers(values: Any) -> list[float | None]:
    listed = values if isinstance(values, list) else []
    return [value if isinstance(value, (int, float)) else None for value in listed]


def _spans(values: Any) -> list[tuple[int, int]]:
    listed = values if isinstance(values, list) else []
    pairs = [one for one in listed if isinstance(one, list) and len(one) == 2]
    return [(a, b) for a, b in pairs if isinstance(a, int) and isinstance(b, int)]
