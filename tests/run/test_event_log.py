import json

import pytest
import torch

from lit_qrl.run.event_log import append_jsonl, log_event, plain, read_jsonl


def test_events_are_appended_in_order(tmp_path):
    folder = tmp_path / "deep" / "run"
    log_event(folder, "guard", "first", iteration=1, value=torch.tensor(2.5))
    log_event(folder, "guard", "second\nline", iteration=2)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [event["message"] for event in events] == ["first", "second\nline"]
    assert events[0]["value"] == 2.5
    assert events[0]["time"] <= events[1]["time"]


def test_a_line_cut_by_a_crash_loses_itself_only(tmp_path):
    path = tmp_path / "samples.jsonl"
    append_jsonl(path, [{"n": 1}, {"n": 2}])
    path.write_bytes(path.read_bytes()[:-4])
    append_jsonl(path, [{"n": 3}])
    assert [record["n"] for record in read_jsonl(path)] == [1, 3]


def test_reading_leaves_out_what_is_no_object(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'[1, 2]\n\xff\xfe\n{"n": 1}\n\n"text"\n' + b"[" * 10**5 + b'\n{"n": 2}')
    assert [record["n"] for record in read_jsonl(path)] == [1, 2]
    assert read_jsonl(tmp_path / "none.jsonl") == []


def test_appending_nothing_makes_no_file(tmp_path):
    append_jsonl(tmp_path / "none.jsonl", [])
    assert not (tmp_path / "none.jsonl").exists()


@pytest.mark.parametrize(
    "value, expected",
    [
        (float("nan"), "nan"),
        (-float("inf"), "-inf"),
        (torch.tensor([1.0, float("inf")]), [1.0, "inf"]),
        ({1: (True, None)}, {"1": [True, None]}),
        (torch.bfloat16, "torch.bfloat16"),
    ],
)
def test_everything_becomes_valid_json(value, expected):
    assert plain(value) == expected
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == expected


def test_text_that_is_no_text_survives(tmp_path):
    # A byte-level tokenizer may decode half a character into a lone surrogate.
    append_jsonl(tmp_path / "s.jsonl", [{"completion": "a\ud83d"}, {"completion": "b"}])
    assert [record["completion"][0] for record in read_jsonl(tmp_path / "s.jsonl")] == ["a", "b"]
