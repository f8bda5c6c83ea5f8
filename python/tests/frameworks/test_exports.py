"""Exported data sets in `datasets` and TRL, as they come."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import tiny
from datasets import Json, List, Value, load_dataset
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import forebay
from forebay import server

TEMPLATE = """{% for message in messages %}{{ message.role }} {{ message.content }}
{% for call in message.tool_calls or [] %} w9 {{ call.function.name }} {% endfor %}{% endfor %}"""

CALL = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}]


def tokenizer() -> Any:
    made = tiny.tokenizer()
    made.chat_template = TEMPLATE
    return made


def post(fb: forebay.Client, policy: str, groups: int) -> None:
    """Posts groups of two conversations, one of them with a call of a tool."""
    fb.put_policy(policy, {"group": {"size": 2}})
    for group in range(groups):
        question: dict[str, Any] = {"role": "user", "content": f"w{group + 2} w2"}
        for index, answer in enumerate((f"w{group + 10}", "w20")):
            called = [{"role": "assistant", "content": None, "tool_calls": CALL}, {"role": "tool", "content": answer}]
            end = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
            fb.post(
                {
                    "policy": policy,
                    "rollout_id": f"{group}-{index}",
                    "group_id": f"{group}",
                    "reward": 1.0 - index,
                    "segments": [{"tokens": [1, 2, 3], "loss_mask": [1, 1], "logprobs": [-0.1, -1e-7]}],
                    "messages": [question, *(called if index else []), end],
                    "metadata": {"tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}]},
                }
            )


def export(fb: forebay.Client, policy: str, form: str, file: Path, *options: str) -> str:
    command = [server.find_binary(), "export", "--format", form, "--policy", policy, "--output", str(file), *options]
    subprocess.run(command, check=True, env={**os.environ, "FOREBAY_URL": fb.url})
    return str(file)


def options(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
    }


def test_rows_have_the_promised_features_and_values(fb: forebay.Client, policy: str, tmp_path: Path) -> None:
    post(fb, policy, 3)
    file = export(fb, policy, "parquet", tmp_path / "rows.parquet")
    rows = load_dataset("parquet", data_files=file, split="train", cache_dir=str(tmp_path / "cache"))
    message = rows.features["messages"].feature
    assert message["role"] == message["content"] == Value("string")
    assert isinstance(message["tool_calls"], Json)
    assert rows.features["tokens"] == List(Value("int32")) and rows.features["logprobs"] == List(Value("float32"))
    assert len(rows) == 6
    called = rows[1]
    assert [one["content"] for one in called["messages"]] == ["w2 w2", "", "w20", "w20"]
    assert called["messages"][1]["tool_calls"] == CALL
    assert (called["reward"], called["verdict"], called["tokens"], called["loss_mask"]) == (
        0.0,
        "kept",
        [1, 2, 3],
        [1, 1],
    )


def test_supervised_training_takes_the_rows_as_they_are(fb: forebay.Client, policy: str, tmp_path: Path) -> None:
    post(fb, policy, 4)
    file = export(fb, policy, "parquet", tmp_path / "rows.parquet", "--require", "messages", "--min-reward", "0.5")
    rows = load_dataset("parquet", data_files=file, split="train", cache_dir=str(tmp_path / "cache"))
    trainer = SFTTrainer(
        tiny.model(), args=SFTConfig(**options(tmp_path)), train_dataset=rows, processing_class=tokenizer()
    )
    before = {name: one.detach().clone() for name, one in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.state.global_step == 2
    assert any(not before[name].equal(one.detach()) for name, one in trainer.model.named_parameters())


def test_preference_training_takes_the_pairs_as_they_are(fb: forebay.Client, policy: str, tmp_path: Path) -> None:
    post(fb, policy, 4)
    for name in ("pairs.parquet", "pairs.jsonl"):
        file = export(fb, policy, "pairs", tmp_path / name)
        form = "parquet" if name.endswith(".parquet") else "json"
        pairs = load_dataset(form, data_files=file, split="train", cache_dir=str(tmp_path / "cache"))
        assert len(pairs) == 4 and pairs[0]["prompt"][0]["content"] == "w2 w2"
        assert pairs[0]["chosen"][0]["content"] == "w10"
        trainer = DPOTrainer(
            tiny.model(),
            ref_model=tiny.model(),
            args=DPOConfig(**options(tmp_path)),
            train_dataset=pairs,
            processing_class=tokenizer(),
        )
        trainer.train()
        assert trainer.state.global_step == 2
