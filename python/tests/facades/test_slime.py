"""slime's own clients against the facade: its generator writes, and its rollout function reads.

They are taken unchanged from the folder that SLIME_SRC names. What they import besides is a stub: no model is loaded,
and the inference engine is a function.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import time
import types
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import requests
from conftest import Service

SOURCE = os.environ.get("SLIME_SRC")

pytestmark = pytest.mark.skipif(SOURCE is None, reason="SLIME_SRC does not name a checkout of slime: NOT TESTED")

SIZE = 2
RULES = 'require = []\ngroup = { size = 2, on_drop = "shrink" }\nsettle = "ack"'
slime = pytest.mark.parametrize("service", [("slime", RULES)], indirect=True)


class Tokenizer:
    """A token per character."""

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> Tokenizer:
        return cls()

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)


class Engine:
    """An inference engine that adds, and is wrong half of the time."""

    def __init__(self, **_: Any) -> None:
        self.chat = types.SimpleNamespace(completions=types.SimpleNamespace(create=self.create))
        self.calls = 0

    def create(self, messages: list[dict[str, str]], **_: Any) -> Any:
        self.calls += 1
        answer = str(eval(messages[-1]["content"].rstrip("=?")) + self.calls % 2)
        choice = types.SimpleNamespace(finish_reason="stop", message=types.SimpleNamespace(content=answer))
        return types.SimpleNamespace(choices=[choice])


@pytest.fixture(scope="session")
def sources() -> Any:
    """The modules of slime, with stubs for what they import from elsewhere."""
    assert SOURCE is not None
    sys.path.insert(0, SOURCE)
    torch = types.ModuleType("torch")
    for name in ("Tensor", "Size", "dtype"):
        setattr(torch, name, type(name, (), {}))
    stubs: dict[str, dict[str, Any]] = {
        "wandb": {},
        "transformers": {"AutoTokenizer": Tokenizer},
        "openai": {"OpenAI": Engine},
        "slime.utils.http_utils": {"is_port_available": None},
        "slime.rollout.rm_hub": {"get_deepscaler_rule_based_reward": lambda text, label: float(text == label)},
    }
    sys.modules["torch"] = torch
    for name, members in stubs.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(members)
    plugin = "slime_plugins.rollout_buffer"
    # Its folders are packages or not, depending on the version.
    for package in ("slime_plugins", plugin):
        if package not in sys.modules:
            module = types.ModuleType(package)
            module.__path__ = [str(Path(SOURCE, *package.split(".")))]
            sys.modules[package] = module
    return types.SimpleNamespace(
        generator=importlib.import_module(f"{plugin}.generator.base_generator"),
        example=importlib.import_module(f"{plugin}.rollout_buffer_example"),
    )


class DataBuffer:
    """The parts of slime's data buffer that its rollout function uses."""

    def __init__(self) -> None:
        self.groups: list[list[Any]] = []
        self.metadata: dict[str, list[Any]] = {}

    def get_metadata(self) -> dict[str, list[Any]]:
        return self.metadata

    def update_metadata(self, metadata: dict[str, list[Any]]) -> None:
        self.metadata.update(metadata)

    def get_buffer_length(self) -> int:
        return len(self.groups)

    def add_samples(self, groups: list[list[Any]]) -> None:
        for group in groups:
            assert len(group) == SIZE, "slime's data source asserts this"
        self.groups += groups

    def get_samples(self, count: int) -> list[list[Any]]:
        taken, self.groups = self.groups[:count], self.groups[count:]
        return taken


def arguments(url: str, **given: Any) -> Namespace:
    return Namespace(
        **{
            "rollout_buffer_url": url,
            "rollout_batch_size": 2,
            "n_samples_per_prompt": SIZE,
            "num_epoch": 1,
            "sglang_router_ip": "127.0.0.1",
            "sglang_router_port": 30000,
            "rollout_task_type": "math",
            "prompt_data": "tasks.jsonl",
            "rollout_max_response_len": 64,
            "rollout_temperature": 1.0,
            "rollout_top_p": 1.0,
            "hf_checkpoint": "none",
            "loss_mask_type": "distill_qwen",
            "fetch_trajectory_retry_times": -1,
            "use_wandb": False,
            **given,
        }
    )


def tasks(folder: Path, count: int) -> Path:
    """A file of tasks. Those without an instance get their line's number from the generator."""
    path = folder / "tasks.jsonl"
    prompts = [[{"role": "user", "content": f"{index}+1=?"}] for index in range(count)]
    lines = [{"prompt": prompt, "label": str(index + 1)} for index, prompt in enumerate(prompts)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def generate(sources: Any, service: Service, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Runs slime's generator to its end. Its pauses between epochs are left out."""
    module = sources.generator
    # Its processes inherit the stubs.
    monkeypatch.setattr(module, "Process", multiprocessing.get_context("fork").Process)
    monkeypatch.setattr(module, "Queue", multiprocessing.get_context("fork").Queue)
    sleep = time.sleep
    monkeypatch.setattr(module.time, "sleep", lambda seconds: sleep(min(seconds, 0.01)))
    generator = module.BaseGenerator(
        "http://engine", service.url, num_repeat_per_sample=SIZE, queue_size=1_000, num_process=2, **options
    )
    generator.entry(str(tasks(folder, 3)), module.query_single_turn, module.get_rule_based_math_reward)
    monkeypatch.undo()


@slime
def test_send_data_to_buffer_repeats_and_nothing_is_stored_twice(sources: Any, service: Service) -> None:
    generator = sources.generator.BaseGenerator("http://engine", service.url + "/")
    item = {"uid": "1", "instance_id": "a", "messages": [], "reward": 1.0, "extra_info": {"timestamp": "1"}}
    for _ in range(3):
        generator.send_data_to_buffer(item)
    generator.send_data_to_buffer({**item, "uid": "2"})
    read = requests.post(service.url + "/get_rollout_data", json={}, timeout=10).json()
    assert [item["uid"] for item in read["data"]["data"]] == ["1", "2"]
    assert read["data"]["data"][0] == item


@slime
def test_the_generator_and_the_rollout_function_work_together(
    sources: Any, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every task is visited in two epochs.
    generate(sources, service, tmp_path, monkeypatch, num_repeats=2)
    # slime's trainer begins, and takes what its step needs.
    monkeypatch.setattr(sources.example, "START_ROLLOUT", True)
    data = DataBuffer()
    groups = sources.example.generate_rollout(arguments(service.url), 0, data)
    assert [len(group) for group in groups] == [SIZE, SIZE]
    # A read has one generation of each task, because slime puts all items of a task into one group.
    assert len(data.metadata["0"]) == len(set(data.metadata["0"])) >= 2
    for step in range(1, 10):
        if sum(len(ids) for ids in data.metadata.values()) == 6:
            break
        groups = sources.example.generate_rollout(arguments(service.url, rollout_batch_size=1), step, data)
        assert [len(group) for group in groups] == [SIZE]
    assert Counter(id for ids in data.metadata.values() for id in ids) == {0: 2, 1: 2, 2: 2}, (
        "both generations of all three tasks"
    )
    assert not requests.post(service.url + "/get_rollout_data", json={}, timeout=10).json()["success"]
    sample = groups[0][0]
    assert sample.status.value == "completed" and sample.metadata["finish_reason"] == "stop"
    assert len(sample.loss_mask) == sample.response_length > 0
    # The next start of slime tells its generator what is done, which skips it.
    payload = sources.example.start_rollout(service.url, arguments(service.url), data.metadata)
    assert payload == {"message": "Rollout started"}
    done = [instance for ids in data.metadata.values() for instance in ids]
    generate(sources, service, tmp_path, monkeypatch, num_repeats=1, skip_instance_ids=done)
    assert not requests.post(service.url + "/get_rollout_data", json={}, timeout=10).json()["success"]


@slime
def test_a_trainer_that_was_killed_gets_its_read_again(
    sources: Any, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate(sources, service, tmp_path, monkeypatch, num_repeats=1)
    lost = requests.post(service.url + "/get_rollout_data", json={}, timeout=10).json()
    assert lost["data"]["meta_info"]["total_samples"] == 3 * SIZE
    # The trainer dies with what it has read, and so does the service.
    service.server.kill()
    service.server.stop()
    service.start()
    monkeypatch.setattr(sources.example, "START_ROLLOUT", True)
    data = DataBuffer()
    groups = sources.example.generate_rollout(arguments(service.url), 0, data)
    assert [len(group) for group in groups] == [SIZE, SIZE]
    assert sorted(data.metadata["0"]) == [0, 1, 2]
