import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_qrl.data.tasks import PrefixSum
from lit_qrl.data.tasks.generated import is_held_out
from tests.examples.scripts import ROOT, check_repeats, check_shipped, importing

SHIPPED = ROOT / "models" / "tiny-prefix-sum"


@pytest.fixture(scope="module")
def script():
    with importing("tiny_model") as module:
        yield module("prefix_sum")


@pytest.fixture(scope="module")
def shipped():
    return AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32), AutoTokenizer.from_pretrained(SHIPPED)


def test_the_shipped_policy_is_small_and_fits_groups_of_128(shipped):
    network, tokenizer = shipped
    check_shipped(SHIPPED, network, 14, 1_000_000, outputs=64)
    assert network.config.vocab_size == len(tokenizer)


def test_the_shipped_policy_gets_about_half_right(script, shipped):
    task = PrefixSum(train_size=1, evaluation_size=256)
    # stopped at the first check above 0.5 of 512 problems; 256 others deviate by 0.03
    assert 0.35 < script.evaluate(*shipped, task, seed=1) < 0.70


def test_teacher_answers_are_right_and_never_held_out(script):
    recipe, tokenizer = script.Recipe(digits=3, batch=200), script.build_tokenizer()
    tokens, labels = script.Teacher(recipe, tokenizer).batch()
    for row, label in zip(tokens, labels, strict=True):
        answered = label != -100
        prompt, answer = tokenizer.decode(row[~answered]), tokenizer.decode(label[answered])
        digits = [int(digit) for digit in prompt.removesuffix(":")]
        assert answer == "".join(str(sum(digits[: n + 1]) % 10) for n in range(3)) + "<eos>"
        assert torch.equal(row[answered], label[answered])
        assert not is_held_out(prompt.removesuffix(":"))


def test_build_repeats_bit_for_bit_and_says_when_it_fails(script, tmp_path, capsys):
    sizes = {"digits": 3, "hidden": 64, "layers": 1, "intermediate": 64, "batch": 16, "max_steps": 10, "accuracy": 2}
    small = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    check_repeats(script, small, tmp_path, status=1)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["steps"] == 10


def test_an_evaluation_counts_answers_that_are_right_to_the_end(script):
    tokenizer, task = script.build_tokenizer(), PrefixSum(digits=3, train_size=1, evaluation_size=40)
    ids, rows = tokenizer.get_vocab(), task.evaluation_rows()
    answers = [[*(ids[c] for c in task.reference(row)), ids["<eos>"]] for row in rows]
    answers[0][-1], answers[1][1] = ids["1"], ids["+"]

    class Fixed:
        """Writes the answers above, whatever it is asked."""

        position = -1

        def eval(self):
            return self

        def forward(self, **inputs):
            self.position += 1
            logits = torch.full((len(rows), 1, len(ids)), -1e9)
            for row, answer in enumerate(answers):
                logits[row, 0, answer[self.position]] = 0.0
            return type("Output", (), {"logits": logits})

        __call__ = forward

    assert script.evaluate(Fixed(), tokenizer, task) == pytest.approx(38 / 40)
