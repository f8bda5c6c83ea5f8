"""Exported Parquet files in the programs that read them: the oldest and the newest versions, in two environments."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import duckdb
import fastparquet
import polars
import pyarrow.parquet
import pytest

import forebay
from forebay import server

Rows = list[dict[str, Any]]
"""The columns `rollout_id`, `reward`, `step`, `tokens`, `logprobs` and the texts of `messages` of each row."""

CALLS = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]

MESSAGES = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4", "reasoning": "two and two", "tool_calls": CALLS},
]


@pytest.fixture
def file(fb: forebay.Client, policy: str, tmp_path: Path) -> str:
    """A file with rows that have messages, and others that have none; no row has a step."""
    for index, messages in enumerate((MESSAGES, None)):
        segment = {"tokens": [5, 6 + index], "loss_mask": [1], "logprobs": [-0.5]}
        rollout = {"policy": policy, "rollout_id": f"r-{index}", "reward": float(index), "segments": [segment]}
        fb.post({**rollout, "messages": messages})
    file = tmp_path / "rows.parquet"
    command = [server.find_binary(), "export", "--format", "parquet", "--policy", policy, "--output", str(file)]
    subprocess.run(command, check=True, env={**os.environ, "FOREBAY_URL": fb.url})
    return str(file)


def by_pyarrow(file: str) -> Rows:
    return pyarrow.parquet.read_table(file).to_pylist()


def by_polars(file: str) -> Rows:
    assert polars.scan_parquet(file).filter(polars.col("reward") > 0.5).collect().height == 1
    return polars.read_parquet(file).to_dicts()


def by_duckdb(file: str) -> Rows:
    assert duckdb.sql(f"SELECT rollout_id FROM '{file}' WHERE reward > 0.5").fetchall() == [("r-1",)]
    found = duckdb.sql(f"SELECT * FROM '{file}' ORDER BY rollout_id")
    return [dict(zip(found.columns, row, strict=True)) for row in found.fetchall()]


def by_datasets(file: str) -> Rows:
    folder = Path(file).parent / "cache"
    rows: Rows = list(datasets.load_dataset("parquet", data_files=file, split="train", cache_dir=str(folder)))
    # Version 5 makes objects of the calls, for chat templates.
    is_text = isinstance(rows[0]["messages"][1]["tool_calls"], str)
    assert is_text == datasets.__version__.startswith("2.")
    return rows


def by_fastparquet(file: str) -> Rows:
    frame = fastparquet.ParquetFile(file).to_pandas()
    assert frame["step"].isna().all() and frame["group_size"].tolist() == [1, 1]
    # It reads nested columns one by one, and lists as arrays.
    rows: Rows = frame[["rollout_id", "reward"]].to_dict("records")
    for row, tokens, logprobs in zip(rows, frame["tokens"], frame["logprobs"], strict=True):
        row |= {"step": None, "tokens": list(tokens), "logprobs": list(logprobs), "messages": NotImplemented}
    return rows


@pytest.mark.parametrize("read", [by_pyarrow, by_polars, by_duckdb, by_datasets, by_fastparquet])
def test_a_file_is_read_with_its_values(file: str, read: Callable[[str], Rows]) -> None:
    rows = read(file)
    names = ("rollout_id", "reward", "step", "tokens", "logprobs")
    assert [[row[name] for name in names] for row in rows] == [
        ["r-0", 0.0, None, [5, 6], [-0.5]],
        ["r-1", 1.0, None, [5, 7], [-0.5]],
    ]
    messages = rows[0]["messages"]
    if messages is NotImplemented:
        return
    assert rows[1]["messages"] is None
    calls = [one["tool_calls"] for one in messages]
    # The text is JSON, or what it says.
    assert [json.loads(call) if isinstance(call, str) else call for call in calls] == [None, CALLS]
    assert [(one["role"], one["content"], one["reasoning_content"]) for one in messages] == [
        ("user", "2 + 2?", None),
        ("assistant", "4", "two and two"),
    ]
