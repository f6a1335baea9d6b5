import pytest
import torch
from torch import nn

from lit_qrl.errors import ConfigError
from lit_qrl.quantize.calibration import LayerRunner, _row_pairs, calibration_sequences
from tests.precision.toy import network


def rows(count=3, length=10):
    return torch.randint(0, 32, (count, length), generator=torch.Generator().manual_seed(0))


def test_hidden_states_pass_the_layers_as_in_the_whole_model():
    model = network().eval()
    with torch.no_grad():
        expected = model(rows(), output_hidden_states=True).hidden_states
        runner = LayerRunner(model, rows(), torch.device("cpu"))
        torch.testing.assert_close(torch.cat(runner.hidden), expected[0])
        out = torch.cat([runner.run(model.model.layers[0], 0, hidden) for hidden in runner.hidden])
    torch.testing.assert_close(out, expected[1])


def test_recording_leaves_the_model_as_it_was():
    model = network().eval()
    with torch.no_grad():
        before = model(rows()).logits
        LayerRunner(model, rows(), torch.device("cpu"))
        assert torch.equal(model(rows()).logits, before)


def test_sequences_are_the_texts_one_after_another():
    texts = ["ab", "cde", "f", "ghij", "never read"]
    encode = [ord(c) for c in "ab|cde|f|ghi"]
    got = calibration_sequences(lambda text: [ord(c) for c in text], iter(texts), 3, 4, ord("|"))
    assert got.tolist() == [encode[0:4], encode[4:8], encode[8:12]]
    without = calibration_sequences(lambda text: [ord(c) for c in text], texts[:3], 2, 3, None)
    assert without.flatten().tolist() == [ord(c) for c in "abcdef"]


def test_too_little_text_says_how_much_there_is():
    with pytest.raises(ConfigError, match=r"4 sequences of 3 tokens\. Given: 7 tokens, enough for 2 sequences"):
        calibration_sequences(lambda text: list(range(len(text))), ["abcd", "efg"], 4, 3, None)


def test_rows_are_folded_only_where_no_value_head_is_shared():
    def layer(kv):
        sizes = {"q_proj": (64, 64), "k_proj": (64, kv), "v_proj": (64, kv), "o_proj": (64, 64)}
        linears = {f"self_attn.{name}": nn.Linear(*size) for name, size in sizes.items()}
        return {**linears, "mlp.gate_proj": nn.Linear(64, 96), "mlp.up_proj": nn.Linear(64, 96)}

    whole = layer(64)
    assert _row_pairs(whole) == [("self_attn.v_proj", "self_attn.o_proj")]
    whole["mlp.down_proj"] = nn.Linear(96, 64)
    assert _row_pairs(whole)[-1] == ("mlp.up_proj", "mlp.down_proj")
    assert _row_pairs({**layer(32), "mlp.down_proj": nn.Linear(96, 64)}) == [("mlp.up_proj", "mlp.down_proj")]
