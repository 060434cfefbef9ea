import time
from pathlib import Path

import pytest

from slipstream.config.data import DataConfig
from slipstream.data import hub
from slipstream.data.source import load_rows, read_file
from slipstream.errors import DataError


def configured(source: object, **keys: object) -> DataConfig:
    return DataConfig.model_validate({"source": str(source), **keys})


def test_json_lines_become_rows_in_order_with_blank_lines_ignored(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "é\u2028", "label": 1}\n\n{"prompt": "b", "label": 2}\n', encoding="utf-8")
    assert load_rows(configured(file)) == [{"prompt": "é\u2028", "label": 1}, {"prompt": "b", "label": 2}]


def test_a_json_file_may_hold_a_list_or_lines(tmp_path: Path) -> None:
    whole, lines = tmp_path / "whole.json", tmp_path / "lines.json"
    whole.write_text('[{"prompt": "a", "label": 1},\n {"prompt": "b", "label": 2}]')
    lines.write_text('{"prompt": "a", "label": 1}\n{"prompt": "b", "label": 2}')
    assert load_rows(configured(whole)) == load_rows(configured(lines))


def test_csv_cells_stay_the_text_that_was_written(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes('\ufeffprompt,label\r\n"a, b\nc",007\r\nd,\r\n'.encode())
    assert load_rows(configured(file)) == [{"prompt": "a, b\nc", "label": "007"}, {"prompt": "d", "label": ""}]


def test_parquet_keeps_types(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": [{"role": "user", "content": "a"}], "label": 3.5}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert load_rows(configured(tmp_path / "a.parquet")) == rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": 1}\n{"prompt": }\n', r"a\.jsonl, line 2: not valid JSON"),
        ("a.jsonl", b'{"prompt": 1}\n[1]\n', r"a\.jsonl, line 2: expected a JSON object, found list"),
        ("a.jsonl", b'{"prompt": 1}\n{"prompt": "\xff"}\n', r"a\.jsonl, line 2: not UTF-8"),
        ("a.json", b'[{"prompt": 1},\n{"prompt" 2}]', r"a\.json, line 2: not valid JSON"),
        ("a.json", b"[3]", r"a\.json, item 0: expected a JSON object, found int"),
        ("a.csv", b"prompt,label\na,1\nb,1,2\n", r"a\.csv, line 3: 3 cells, but the header has 2"),
        ("a.csv", b"prompt,prompt\na,1\n", r"a\.csv, line 1: a column name occurs twice"),
        ("a.csv", b'prompt,label\n"a"b,1\n', r"a\.csv, line 2: not valid CSV"),
        ("a.parquet", b"PAR1 nonsense", r"a\.parquet: not a valid parquet file"),
        ("a.txt", b"x", r"a\.txt: unknown file type '\.txt'; expected one of \.jsonl"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_file(tmp_path / name)


def test_an_empty_dataset_and_a_missing_file_are_errors(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="holds no rows"):
        load_rows(configured(tmp_path / "empty.jsonl"))
    for missing in (tmp_path / "no.jsonl", "no.csv", "./data/train"):
        with pytest.raises(DataError, match="no file or folder"):
            load_rows(configured(missing))


def test_a_folder_gives_the_files_of_the_split(tmp_path: Path) -> None:
    (tmp_path / "train-00000-of-00002.jsonl").write_text('{"prompt": "a", "label": 1}')
    (tmp_path / "train-00001-of-00002.jsonl").write_text('{"prompt": "b", "label": 1}')
    (tmp_path / "test.jsonl").write_text('{"prompt": "c", "label": 1}')
    (tmp_path / "main").mkdir()
    (tmp_path / "main" / "validation.csv").write_text("prompt,label\nd,1\n")
    prompts = {
        split: [row["prompt"] for row in load_rows(configured(tmp_path, split=split))] for split in ("train", "test")
    }
    assert prompts == {"train": ["a", "b"], "test": ["c"]}
    assert load_rows(configured(tmp_path, split="validation", subset="main")) == [{"prompt": "d", "label": "1"}]
    with pytest.raises(DataError, match=r"data\.split: no file of the split 'dev'.*files found: .*test\.jsonl"):
        load_rows(configured(tmp_path, split="dev"))
    (tmp_path / "train.csv").write_text("prompt,label\na,1\n")
    with pytest.raises(DataError, match=r"as \.csv and \.jsonl"):
        load_rows(configured(tmp_path))


def test_rows_limits_how_many_are_used(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,label\na,1\nb,2\nc,3\n")
    assert [row["prompt"] for row in load_rows(configured(tmp_path / "a.csv", rows=2))] == ["a", "b"]


def test_reasoning_gym_rows_are_the_entries_its_scorer_takes() -> None:
    keys = {
        "rows": 4,
        "task_options": {"min_terms": 2, "max_terms": 2},
        "prompt_key": "question",
        "label_key": "answer",
    }
    rows = load_rows(configured("reasoning_gym:chain_sum", **keys))
    assert rows == load_rows(configured("reasoning_gym:chain_sum", **keys))
    assert rows != load_rows(configured("reasoning_gym:chain_sum", task_seed=9, **keys))
    assert [sorted(row) for row in rows] == [["answer", "metadata", "question"]] * 4
    import reasoning_gym

    scorer = reasoning_gym.get_score_answer_fn("chain_sum")
    assert [scorer(row["answer"], row) for row in rows] == [1.0] * 4
    assert all(row["metadata"]["num_terms"] == 2 for row in rows)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("chain_smu", {}, r"no task 'chain_smu'; did you mean 'chain_sum'\?"),
        ("chain_sum", {"min_term": 2}, r"no option 'min_term'; did you mean 'min_terms'\? \(options: .*max_digits"),
        ("chain_sum", {"min_terms": 9}, r"refuses \{'min_terms': 9\}: AssertionError: max_terms must be"),
        ("chain_sum", {"seed": 1}, r"set data\.task_seed instead of 'seed'"),
        ("chain_sum", {"size": 1}, r"set data\.rows instead of 'size'"),
    ],
)
def test_a_wrong_reasoning_gym_task_or_option_is_explained(task: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_rows(configured(f"reasoning_gym:{task}", rows=2, task_options=options))


def test_an_unreachable_hub_is_reported_at_once(unreachable_hub: None) -> None:
    from huggingface_hub import constants

    start = time.monotonic()
    with pytest.raises(DataError, match=r"cannot load 'nobody/nothing'.*offline.*set data\.source to a local jsonl"):
        load_rows(configured("nobody/nothing"))
    assert time.monotonic() - start < 15, "most of it importing: nothing is retried"
    assert not constants.HF_HUB_OFFLINE, "the process is not left offline"


def test_a_hub_dataset_is_loaded_by_name_subset_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load_dataset(name: str, subset: str | None, *, split: str) -> datasets.Dataset:
        asked.append((name, subset, split))
        return datasets.Dataset.from_list([{"question": "q", "answer": "a"}])

    monkeypatch.setattr(hub, "hub_answers", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    keys = {"subset": "main", "split": "test", "prompt_key": "question", "label_key": "answer"}
    assert load_rows(configured("openai/gsm8k", **keys)) == [{"question": "q", "answer": "a"}]
    assert asked == [("openai/gsm8k", "main", "test")]


def test_an_unknown_split_of_the_hub_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(*_: object, **__: object) -> None:
        raise ValueError("Unknown split \"tain\". Should be one of ['train', 'test'].")

    monkeypatch.setattr(hub, "hub_answers", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"hub dataset 'openai/gsm8k' cannot be loaded: Unknown split"):
        load_rows(configured("openai/gsm8k", split="tain"))


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.jsonl", b'{"a": ' + b"9" * 5000 + b"}\n"), ("a.json", b"[" * 100_000), ("b.jsonl", b"[" * 100_000)],
)
def test_json_that_python_cannot_read_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name}.*: cannot be read"):
        read_file(tmp_path / name)


def test_a_value_of_a_parquet_file_that_python_has_not_is_named(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    times = pyarrow.array([2**60], type=pyarrow.timestamp("ms"))
    pyarrow.parquet.write_table(pyarrow.table({"a": times}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: "):
        read_file(tmp_path / "a.parquet")
