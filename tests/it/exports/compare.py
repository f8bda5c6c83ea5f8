"""Compares a Parquet file with the NDJSON of the same rows, and with the columns that are promised."""

import json
import struct
import sys
from pathlib import Path

import pyarrow.parquet as pq

COLUMNS = (
    "messages tools reward reward_components advantage verdict reason state status environment policy run "
    "policy_version step group_id group_size rollout_id execution_id suite task segment segments kind tokens response_length "
    "loss_mask logprobs teacher_logprobs values advantages versions turns columns media temperature top_p top_k metadata received_at"
).split()

folder = Path(sys.argv[1])
table = pq.read_table(folder / "rows.parquet")
assert table.column_names == COLUMNS, table.column_names
metadata = pq.ParquetFile(folder / "rows.parquet").metadata
assert metadata.row_group(0).column(0).compression == "ZSTD"
assert metadata.num_columns > len(COLUMNS)


def single(value):
    """The nearest float of 32 bits, as a float of Python."""
    return struct.unpack("f", struct.pack("f", value))[0]


def text(content):
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


found = table.to_pylist()
lines = (folder / "rows.ndjson").read_text().splitlines()
expected = [json.loads(line) for line in lines]
assert list(expected[0]) == COLUMNS
assert len(found) == len(expected)
for row, posted in zip(found, expected):
    for name in COLUMNS:
        have, want = row[name], posted[name]
        if name in ("tools", "metadata", "reward_components", "columns", "media"):
            have = None if have is None else json.loads(have)
        if name in ("logprobs", "teacher_logprobs", "values", "advantages") and want is not None:
            want = [single(value) for value in want]
        if name in ("temperature", "top_p"):
            want = single(want)
        if name == "versions" and have is not None:
            have = [[span["version"], span["start"], span["length"]] for span in have]
        if name == "messages" and want is not None:
            assert [message["role"] for message in have] == [message["role"] for message in want]
            assert [message["content"] for message in have] == [text(message["content"]) for message in want]
            calls = [message.get("tool_calls") for message in want]
            assert [json.loads(message["tool_calls"]) if message["tool_calls"] else None for message in have] == calls
            continue
        assert have == want, (name, have, want)
print(len(found), "rows agree")
