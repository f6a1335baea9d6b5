import time
from itertools import pairwise

import pytest
import torch

from lit_qrl.data.environment import MultiTurnTask
from lit_qrl.errors import StoppedError
from lit_qrl.loop.batching import assemble
from lit_qrl.loop.turns import Conversations, TakesTurns, TurnsOver, joined
from lit_qrl.rollout.engine import Converses
from lit_qrl.types import Completion, SamplingParams
from tests.networks import build_network, build_tokenizer
from tests.rollout.embedded.test_engine import engine_of
from tests.routes import CHOSEN, LAYERS, build_mixture

TOKENIZER = build_tokenizer(pad_token="<pad>", eos_token="<eos>")
EOS = TOKENIZER.eos_token_id


class Echo(MultiTurnTask):
    """Says its row's words, one after each answer; the score is the number of answers."""

    name = "echo"
    processes = False  # which start by the imports of this file

    def train_rows(self):
        return [{"says": ["1+", "2+"]}]

    def evaluation_rows(self):
        return self.train_rows()

    def prompt(self, row):
        return "3,4="

    def start(self, row):
        return {"left": list(row["says"]), "answers": []}

    def reply(self, state, answer):
        state["answers"].append(answer)
        return state["left"].pop(0) if state["left"] else None

    def finish(self, state):
        return float(len(state["answers"]))


def encode(messages):
    return TOKENIZER("".join(m["content"] for m in messages), add_special_tokens=False)["input_ids"]


def talk(task, rows, answer, max_tokens=40, **options):
    """Play every row against `answer(turn)`, without an engine; return the completions and the turns drawn."""
    prompts, turns = [[5, 6]] * len(rows), []
    with Conversations(task, rows, prompts, encode, TOKENIZER.decode, max_tokens, seed=3, **options) as talks:
        while talks.open:
            for turn in talks.waiting("all"):
                turns.append(turn)
                talks.answered(turn, answer(turn))
        return talks.completions(), turns


def said(ids, reason="stop"):
    return Completion(token_ids=ids, logprobs=[-0.5] * len(ids), finish_reason=reason, version=7)


def test_a_sequence_is_what_was_drawn_and_what_was_said_in_turn():
    (completion,), turns = talk(Echo(), [{"says": ["1+", "2+"]}], lambda turn: said([9, len(turn.tokens), EOS]))
    first, second = encode([{"content": "1+"}]), encode([{"content": "2+"}])
    assert completion.token_ids == [9, 2, EOS, *first, 9, 7, EOS, *second, 9, 12, EOS]
    assert completion.drawn == [True] * 3 + [False] * 2 + [True] * 3 + [False] * 2 + [True] * 3
    assert completion.logprobs == [-0.5 if drawn else 0.0 for drawn in completion.drawn]
    assert [turn.tokens for turn in turns][-1] == [5, 6, *completion.token_ids[:-3]]
    assert (completion.episode.score, completion.episode.ended, completion.episode.turns) == (3.0, "done", 3)
    assert completion.version == 7
    assert isinstance(Echo(), TakesTurns)


def test_turns_have_seeds_of_their_own_that_depend_on_sequence_and_number_alone():
    rows = [{"says": ["1+"]}, {"says": []}, {"says": ["1+"]}]
    _, together = talk(Echo(), rows, lambda turn: said([9, EOS]))
    _, alone = talk(Echo(), rows[:1], lambda turn: said([9, EOS]))
    assert len({turn.seed for turn in together}) == len(together) == 5
    assert [turn.seed for turn in together if turn.index == 0] == [turn.seed for turn in alone]


@pytest.mark.parametrize(
    "limits, max_tokens, ended, turns",
    [({"max_turns": 2}, 40, "turns", 2), ({}, 9, "length", 2), ({}, 6, "length", 2), ({}, 5, "length", 1)],
)
def test_a_limit_ends_the_sequence_with_its_score_so_far(limits, max_tokens, ended, turns):
    def answer(turn):
        assert 1 <= turn.max_tokens <= max_tokens
        return said([9, 9, EOS]).cut(turn.max_tokens)

    (completion,), _ = talk(Echo(**limits), [{"says": ["1+"] * 5}], answer, max_tokens)
    assert (completion.episode.ended, completion.episode.turns) == (ended, turns)
    assert completion.episode.score is not None
    assert len(completion.token_ids) <= max_tokens
    assert completion.drawn[-1]


class Broken(Echo):
    def reply(self, state, answer):
        kind = state["left"][0] if state["left"] else ""
        if kind == "raise":
            raise KeyError("no such tool")
        if kind == "exit":
            raise SystemExit(3)
        if kind == "hang":
            time.sleep(60)
        return "7" * 10_000_000 if kind == "shout" else super().reply(state, answer)

    def finish(self, state):
        return float("nan") if state["left"] == ["nan"] else super().finish(state)


def test_a_bad_environment_costs_its_own_sequence():
    kinds = ["1+", "raise", "exit", "hang", "shout", ""]
    begun = time.monotonic()
    completions, _ = talk(Broken(time_limit=3.0), [{"says": [kind]} for kind in kinds], lambda turn: said([9, EOS]))
    assert time.monotonic() - begun < 40
    ended = [completion.episode for completion in completions]
    assert [one.ended for one in ended] == ["done", "error", "error", "time", "error", "error"]
    assert [one.score for one in ended] == [2.0, *[None] * 5]
    assert "KeyError: 'no such tool'" in ended[1].error
    assert "SystemExit" in ended[2].error
    assert "3 s" in ended[3].error
    assert "10000000 characters" in ended[4].error
    assert "empty" in ended[5].error
    assert [completion.token_ids for completion in completions[1:]] == [[9, EOS]] * 5
    task = Broken()
    task.reply = lambda state, answer: None
    (completion,), _ = talk(task, [{"says": ["nan"]}], lambda turn: said([9, EOS]))
    assert completion.episode.score is None
    assert "nan" in completion.episode.error


class Blocking(Echo):
    async def reply(self, state, answer):  # pyright: ignore
        time.sleep(6)


def test_an_environment_that_blocks_all_others_is_named():
    with pytest.raises(StoppedError, match=r"Blocking blocks all others.*Make it a plain method"):
        talk(Blocking(time_limit=0.5), [{"says": ["1+"]}], lambda turn: said([9, EOS]))


def test_a_machine_that_stood_still_blames_no_environment(monkeypatch):
    late, now = [0.0], time.monotonic
    monkeypatch.setattr("lit_qrl.loop.turns.time.monotonic", lambda: now() + late[0])

    def answer(turn):
        late[0] += 1000
        return said([9, EOS])

    (completion,), _ = talk(Echo(), [{"says": ["1+", "2+"]}], answer)
    assert (completion.episode.ended, completion.episode.turns) == ("done", 3)


class OwnOrder(Echo):
    async def play(self, row, say):
        try:
            await say([])
            await say([{"role": "user", "content": "1+"}])
        except TurnsOver:
            return -1.0
        return 0.25


def test_a_task_may_play_in_an_order_of_its_own():
    (completion,), _ = talk(OwnOrder(), [{}], lambda turn: said([9, EOS]))
    assert completion.episode.score == 0.25
    (completion,), _ = talk(OwnOrder(max_turns=1), [{}], lambda turn: said([9, EOS]))
    assert (completion.episode.score, completion.episode.ended) == (-1.0, "turns")


class Endless(Echo):
    """Does not hear that a limit is reached."""

    async def play(self, row, say):
        while True:
            try:
                await say([{"role": "user", "content": "1+"}])
            except TurnsOver:
                if not row["says"]:
                    return 1.0


def test_an_environment_without_an_end_costs_its_own_sequence():
    rows = [{"says": ["1+"]}, {"says": []}]
    (endless, other), turns = talk(Endless(max_turns=3, time_limit=2.0), rows, lambda turn: said([9, EOS]))
    assert (endless.episode.ended, endless.episode.score, endless.episode.turns) == ("time", None, 3)
    assert (other.episode.ended, other.episode.score) == ("turns", 1.0)
    assert len(turns) == 6


@pytest.fixture(scope="module")
def network():
    return build_network()


def test_the_embedded_engine_draws_what_the_model_says_of_the_whole_sequence(network):
    engine = engine_of(network, sampling=SamplingParams(max_tokens=24, stop_token_ids=(EOS,)))
    assert isinstance(engine, Converses)
    rows, prompts = [{"says": ["1+", "2+", "3="]}] * 6, [[5, 6, 7], [8]] * 3
    with Conversations(Echo(), rows, prompts, encode, TOKENIZER.decode, 24, seed=3) as talks:
        engine.converse(talks)
    completions = talks.completions()
    assert max(completion.episode.turns for completion in completions) > 1
    for prompt, completion in zip(prompts, completions, strict=True):
        logits = network(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1].detach()
        expected = logits.double().log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        drawn = torch.tensor(completion.drawn)
        torch.testing.assert_close(
            torch.tensor(completion.logprobs).double()[drawn], expected[drawn], atol=1e-5, rtol=0
        )
        assert not torch.tensor(completion.logprobs)[~drawn].any()
        ends = [i for i, (one, after) in enumerate(pairwise([*completion.drawn, False])) if one and not after]
        assert all(completion.token_ids[i] == EOS for i in ends[:-1])


def test_the_batch_of_conversations_trains_on_what_was_drawn_alone():
    completions, _ = talk(Echo(), [{"says": ["1+"]}, {"says": []}], lambda turn: said([9, EOS]))
    batch = assemble([[5, 6]], completions, group_size=2, pad_token_id=0)
    assert batch.mask.tolist() == [[True, True, False, False, True, True], [True, True] + [False] * 4]
    assert batch.completion_length.tolist() == [4, 2]
    assert batch.total_length.tolist() == [8, 4]
    assert batch.tokens[0].tolist() == [5, 6, *completions[0].token_ids]


def test_what_the_environment_said_was_drawn_among_nothing():
    def answer(turn):
        one = said([9, EOS])
        one.kept = [torch.tensor([9, 4, len(turn.tokens)]), torch.tensor([EOS])]
        return one

    (completion,), _ = talk(Echo(), [{"says": ["1+", "2+"]}], answer)
    kept = [ids.tolist() for ids in completion.kept]
    assert kept == [[9, 4, 2], [EOS], [], [], [9, 4, 6], [EOS], [], [], [9, 4, 10], [EOS]]
    assert [len(ids) > 0 for ids in kept] == completion.drawn
    batch = assemble([[5, 6]], [completion], group_size=1, pad_token_id=0)
    assert (batch.kept >= 0).any(dim=2).tolist() == batch.mask.tolist()


def test_a_token_keeps_the_experts_with_which_it_was_drawn():
    def routes(*numbers):
        return torch.tensor(numbers, dtype=torch.uint8)[:, None, None]

    first = joined(None, routes(1, 2, 3, 255))  # two tokens of prompt, two drawn
    both = joined(first, routes(7, 7, 7, 4, 5, 6, 255))  # one said, two drawn
    assert both.flatten().tolist() == [1, 2, 3, 4, 5, 6, 255]


def test_conversations_say_which_experts_every_token_took():
    network = build_mixture()
    sampling = SamplingParams(max_tokens=24, stop_token_ids=tuple(range(1, 14)))
    engine = engine_of(network, None, sampling, {"routes": True})
    rows, prompts = [{"says": ["1+", "2+"]}] * 2, [[5, 6, 7], [8]]
    with Conversations(Echo(), rows, prompts, encode, TOKENIZER.decode, 24, seed=3) as talks:
        engine.converse(talks)
    completions = talks.completions()
    assert max(completion.episode.turns for completion in completions) > 1
    batch = assemble(prompts, completions, 1, 0)
    assert batch.routed_experts.shape == (*batch.tokens.shape, LAYERS, CHOSEN)
