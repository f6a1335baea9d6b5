import json

from lit_qrl.callbacks.predictions import PREDICTIONS_FILE, Predictions
from tests.tiny_run import build


def test_one_line_per_completion_and_where_they_are_and_an_earlier_file_is_put_aside(tmp_path, capsys):
    path = tmp_path / "run" / PREDICTIONS_FILE
    path.parent.mkdir()
    path.write_text("earlier\n")
    trainer, module, data = build(tmp_path, callbacks=[Predictions()], data={"evaluation_samples": 2})
    drawn = trainer.predict(module, datamodule=data)
    assert (tmp_path / "run" / "predictions.1.jsonl").read_text() == "earlier\n"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records == [record for batch in drawn for record in batch]
    assert len(records) == 8 * 2
    for record in records:
        assert set(record) == {"benchmark", "prompt", "completion", "reward", "parts", "correct"}
        digits = sum(character.isdigit() for character in record["completion"]) / max(len(record["completion"]), 1)
        assert abs(record["reward"] - digits) < 1e-6
        assert abs(record["parts"]["digits"] - digits) < 1e-6
        assert record["correct"] is record["completion"][:1].isdigit()
    mean, correct = (sum(record[key] for record in records) / 16 for key in ("reward", "correct"))
    line = f"Predictions: {path} (16 completions, mean reward {mean:.3f}, {correct:.1%} correct)"
    assert capsys.readouterr().out.strip().splitlines()[-1] == line
