import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_qrl.data.tasks.generated import is_held_out
from lit_qrl.data.tasks.sudoku import CELLS, Sudoku
from lit_qrl.network.denoising import denoises
from tests.examples.scripts import ROOT, check_repeats, check_shipped, importing

SHIPPED = ROOT / "models" / "tiny-diffusion-sudoku"


@pytest.fixture(scope="module")
def script():
    with importing("tiny_model") as module:
        yield module("build_diffusion")


@pytest.fixture(scope="module")
def shipped():
    return AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32), AutoTokenizer.from_pretrained(SHIPPED)


def test_shipped_model_is_a_small_denoiser_of_kernel_friendly_sizes(shipped):
    network, tokenizer = shipped
    check_shipped(SHIPPED, network, 7 * network.config.num_hidden_layers, 4_000_000)
    assert denoises(network.config)
    assert network.config.mask_token_id == tokenizer.mask_token_id
    assert network.config.vocab_size == len(tokenizer)
    puzzle = "1030000020100304:"
    assert tokenizer.decode(tokenizer(puzzle).input_ids) == puzzle


def test_shipped_model_solves_some_puzzles(shipped, script):
    network, tokenizer = shipped
    task = Sudoku(8, prompt_format="short", train_size=1, evaluation_size=150)
    solved = script.evaluate(network, tokenizer, task, temperature=1.0, seed=1)
    # The band is 0.30 to 0.50 on 500 puzzles; 150 puzzles add two standard errors of 0.04.
    assert 0.22 < solved < 0.58


def test_batches_mask_what_they_say_and_hold_no_held_out_puzzle(script):
    recipe = script.Recipe(batch=64, puzzles=40)
    tokenizer = script.build_tokenizer(script.CHARACTERS, mask_token="<mask>")
    teacher = script.Teacher(recipe, tokenizer)
    assert not any(is_held_out(puzzle) for puzzle, _ in teacher.puzzles)
    for wrong_share, wrong_cells in ((0.0, 0), (1.0, 2)):
        tokens, masked, share = teacher.batch(wrong_share)
        assert tokens.shape == masked.shape == (64, 2 * CELLS + 1)
        assert masked[share == 1.0, -CELLS:].all()
        assert not masked[1::2, :-CELLS].any()
        assert 0.05 < masked[::2, :-CELLS].float().mean() < 0.3
        known = dict(teacher.puzzles)
        for row in tokens:
            puzzle, answer = tokenizer.decode(row).split(":")
            differing = [i for i in range(CELLS) if answer[i] != known[puzzle][i]]
            assert len(differing) == wrong_cells
            assert all(puzzle[i] == "0" for i in differing)


def test_build_repeats_bit_for_bit(script, tmp_path, capsys):
    small = "--layers 1 --batch 8 --steps 4 --unsure_steps 1 --puzzles 30 --threads 1 --evaluation_size 8"
    check_repeats(script, [*small.split(), "--any_accuracy"], tmp_path)
    results = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert set(json.loads(results[-1])) == {"solved", "greedy_solved"}
    assert script.main([*small.split(), "--output", str(tmp_path / "out")]) == 1


def test_training_lowers_the_loss(script):
    recipe = script.Recipe(layers=1, batch=32, puzzles=64)
    tokenizer = script.build_tokenizer(script.CHARACTERS, mask_token="<mask>")
    network, teacher = script.build_network(recipe, tokenizer), script.Teacher(recipe, tokenizer)
    losses = list(script.minimize(network, lambda: teacher.loss(network, 0.0), 40, 6e-3, 0.05))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
