import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from lit_qrl.data.sources import read_rows
from lit_qrl.errors import ConfigError

ROWS = [{"question": "1+1 =\n?", "answer": "2"}, {"question": "Größe, “x”", "answer": "0140"}]


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def write_jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_csv(path, delimiter=","):
    datasets.Dataset.from_list(ROWS).to_pandas().to_csv(path, sep=delimiter, index=False)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "A.JSONL"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name):
    path = tmp_path / name
    match path.suffix.lower():
        case ".jsonl":
            write_jsonl(path)
        case ".json":
            path.write_text(json.dumps(ROWS))
        case ".csv":
            write_csv(path)
        case ".tsv":
            write_csv(path, "\t")
        case ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert read_rows(str(path)) == ROWS
    assert read_rows(name) == ROWS


def test_blank_lines_and_a_byte_order_mark_are_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_text('\ufeff{"a": 1}\n\n{"a": 2}\n', encoding="utf-8")
    assert read_rows("a.jsonl") == [{"a": 1}, {"a": 2}]


def test_folders_of_files_and_saved_data_sets(tmp_path):
    (tmp_path / "plain").mkdir()
    write_jsonl(tmp_path / "plain" / "train.jsonl")
    write_jsonl(tmp_path / "plain" / "test.jsonl", ROWS[:1])
    assert read_rows(str(tmp_path / "plain")) == ROWS
    assert read_rows("plain", split="test") == ROWS[:1]
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": saved, "test": saved.select([1])}).save_to_disk(tmp_path / "two")
    assert read_rows("one") == ROWS
    assert read_rows("two", split="test") == ROWS[1:]
    with pytest.raises(ConfigError, match=r"no split 'tset'.*train, test.*Did you mean 'test'"):
        read_rows("two", split="tset")


def test_a_missing_file_names_the_nearest(tmp_path):
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train.jsonl")
    for given, said in (
        ("data/trian.jsonl", r"'data/trian.jsonl' does not exist.*Did you mean 'data/train.jsonl'"),
        ("data/zzz.csv", r"does not exist.*data has no file of such a name"),
        ("dta/train.jsonl", r"does not exist.*/dta does not exist either"),
        ("data/train", "does not exist"),
        (str(tmp_path / "nothing"), "does not exist"),
        ("no-such/data-set", r"'no-such/data-set' \(split 'train'\) cannot be loaded.*without a network"),
        ("what is this?", "is no data set"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_rows(given)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", '{"a": 1}\n{"a": \n', "line 2, which is not JSON"),
        ("a.jsonl", '{"a": 1}\n5\n', "Row 2 of .*is not a row"),
        ("a.json", '{"a": 1}', "cannot be read.*a dict"),
        ("a.json", "[1", "cannot be read"),
        ("a.json", "[" * 10**5, "cannot be read.*recursion"),
        ("a.jsonl", '{"a": 1}\n' + "[" * 10**5, "line 2, which is not JSON"),
        ("a.parquet", "nonsense", "cannot be read"),
        ("b.json", '{"rows": [{"a": 1}]}', r"a dict, where a list of objects stands alone.*\.jsonl"),
        ("a.txt", "text", "kind of the data file .*unknown.*jsonl"),
        ("a.jsonl", "", "is empty"),
        ("a.csv", "a,b\n", "is empty"),
        ("a.json", "[]", "is empty"),
        ("a.jsonl", "\udcff\udcfe", "cannot be read"),  # bytes that are no text
    ],
)
def test_unreadable_files(tmp_path, name, content, message):
    (tmp_path / name).write_text(content, errors="surrogateescape")
    with pytest.raises(ConfigError, match=message):
        read_rows(name)
