"""Rows of a dataset, from the hub, from local files or from a reasoning-gym task, as plain dictionaries.

The first station of all data: `data/prompts.py` and `data/conversation.py` render what comes from here. A row's
place in the returned list is its number everywhere (`Prompt.row`, drop reports, error messages). Leaves out
streaming: all rows of a run are in memory.

What a file holds is what a row holds: JSON and parquet keep their types; a CSV cell is always text, so that an
answer '007' or '1e3' reaches the reward function as it was written.
"""

import csv
import io
import json
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from slipstream.config.data import REASONING_GYM_PREFIX, DataConfig
from slipstream.data.hub import hub_or_cache
from slipstream.errors import DataError

Row = dict[str, Any]

FILE_TYPES = (".jsonl", ".json", ".csv", ".parquet")
LONGEST_CSV_CELL = 1 << 30


def load_rows(config: DataConfig) -> list[Row]:
    """The rows `config` names, at most `config.rows` of them, in the order of the source.

    A folder is searched for files that carry the name of the split, as in 'train.jsonl', 'gsm8k_train.csv' or
    'train/part-0.parquet'; `subset` then names a folder inside it, if there is one. A single file has no splits.

    reasoning-gym seeds row i with `task_seed + i`: two sources of one task whose seeds lie closer than `rows` share
    questions. Take task seeds that are far apart (0 and 1000000).

    Raises DataError if the source cannot be read or is empty.
    """
    source = config.source
    path = Path(source)
    if source.startswith(REASONING_GYM_PREFIX):
        rows = _reasoning_gym_rows(config)
    elif path.is_file():
        rows = read_file(path)
    elif path.is_dir():
        rows = [row for file in _split_files(path, config) for row in read_file(file)]
    elif _looks_like_path(source):
        raise DataError(f"data.source: no file or folder {source!r} (looked from {Path.cwd()})")
    else:
        rows = _hub_rows(config)
    if not rows:
        raise DataError(f"data.source: {source!r} holds no rows")
    return rows[: config.rows]


def read_file(path: Path) -> list[Row]:
    """All rows of one jsonl, json, csv or parquet file. Raises DataError that names the file and the line."""
    readers = {".jsonl": _read_json_lines, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: unknown file type {path.suffix!r}; expected one of {', '.join(FILE_TYPES)}")
    try:
        return reader(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _read_text(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: not UTF-8 text ({error.reason}); save the file as UTF-8") from error


def _read_json_lines(path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: not valid JSON: {error.msg} (column {error.colno})") from error
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists in lists
            raise DataError(f"{path}, line {number}: cannot be read: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: expected a JSON object, found {type(row).__name__}")
        rows.append(row)
    return rows


def _read_json(path: Path) -> list[Row]:
    """One list of objects; a file that does not begin with '[' is read as JSON lines, which many such files are."""
    text = _read_text(path)
    if not text.lstrip().startswith("["):
        return _read_json_lines(path)
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}: not valid JSON: {error.msg} (column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{path}, item {number}: expected a JSON object, found {type(row).__name__}")
    return list(rows)


def _read_csv(path: Path) -> list[Row]:
    csv.field_size_limit(LONGEST_CSV_CELL)
    reader = csv.reader(io.StringIO(_read_text(path), newline=""), strict=True)
    rows = []
    try:
        header = next(reader, [])
        if len(set(header)) != len(header):
            raise DataError(f"{path}, line 1: a column name occurs twice: {', '.join(header)}")
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise DataError(
                    f"{path}, line {reader.line_num}: {len(cells)} cells, but the header has {len(header)} columns; "
                    "quote cells that contain commas"
                )
            rows.append(dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not valid CSV: {error}") from error
    return rows


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        return list(pyarrow.parquet.ParquetFile(path).read().to_pylist())
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a valid parquet file: {error}") from error
    except (ValueError, OverflowError) as error:  # a time that Python has not, text that is not UTF-8
        raise DataError(f"{path}: has a value that cannot be read: {error}") from error


def _looks_like_path(source: str) -> bool:
    if source.startswith(("/", ".", "~")) or Path(source).suffix.lower() in FILE_TYPES:
        return True
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) is None


def _split_files(folder: Path, config: DataConfig) -> list[Path]:
    """Files of the split, sorted by name."""
    if config.subset is not None and (folder / config.subset).is_dir():
        folder = folder / config.subset
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in FILE_TYPES and path.is_file())
    visible = [path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    if not visible:
        raise DataError(f"data.source: no {', '.join(FILE_TYPES)} file in the folder {folder}")
    chosen = [path for path in visible if _carries_split(path.relative_to(folder), config.split)]
    if not chosen:
        names = ", ".join(str(path.relative_to(folder)) for path in visible[:10])
        raise DataError(f"data.split: no file of the split {config.split!r} in {folder} (files found: {names})")
    types = sorted({path.suffix.lower() for path in chosen})
    if len(types) > 1:
        raise DataError(
            f"data.source: the split {config.split!r} is in {folder} as {' and '.join(types)}; name one file instead"
        )
    return chosen


def _carries_split(path: Path, split: str) -> bool:
    return split in path.parts[:-1] or path.stem == split or split in re.split(r"[-_.]", path.stem)


def _reasoning_gym_rows(config: DataConfig) -> list[Row]:
    """Rows {question, answer, metadata}: the entries that the task's own scorer expects."""
    import warnings

    with warnings.catch_warnings():  # packages it imports have sloppy literals; not the user's concern
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

    task = config.source.removeprefix(REASONING_GYM_PREFIX)
    if task not in DATASETS:
        nearest = get_close_matches(task, DATASETS, n=1)
        suggestion = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise DataError(f"data.source: reasoning-gym has no task {task!r}{suggestion} ({len(DATASETS)} tasks known)")
    known = sorted(set(DATASETS[task][1].__dataclass_fields__) - {"size", "seed"})
    for option in config.task_options:
        if option in ("size", "seed"):
            key = {"size": "data.rows", "seed": "data.task_seed"}[option]
            raise DataError(f"data.task_options: set {key} instead of {option!r}")
        if option not in known:
            nearest = get_close_matches(option, known, n=1)
            suggestion = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise DataError(
                f"data.task_options: the task {task!r} has no option {option!r}{suggestion} (options: "
                f"{', '.join(known)})"
            )
    try:
        dataset = reasoning_gym.create_dataset(task, size=config.rows, seed=config.task_seed, **config.task_options)
        return [dict(dataset[index]) for index in range(len(dataset))]
    except Exception as error:  # a task checks its options by assertion, or only fails when it makes a question
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"data.task_options: the task {task!r} refuses {config.task_options}: {reason}") from error


def _hub_rows(config: DataConfig) -> list[Row]:
    import datasets

    with hub_or_cache() as answers:
        # datasets keeps a copy of the hub library's switch
        before, datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE, not answers
        try:
            dataset = datasets.load_dataset(config.source, config.subset, split=config.split)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            if answers:
                raise DataError(f"data.source: the hub dataset {config.source!r} cannot be loaded: {error}") from error
            raise DataError(
                f"data.source: cannot load {config.source!r}: the Hugging Face hub cannot be reached (this machine is "
                "offline), the dataset is not in the local cache, and no file or folder has this name; set "
                "data.source to a local jsonl, json, csv or parquet file"
            ) from error
        finally:
            datasets.config.HF_HUB_OFFLINE = before
    return [dict(row) for row in dataset]
