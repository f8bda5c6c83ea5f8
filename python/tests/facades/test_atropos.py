"""Atropos' own tests, environments and example trainer against the facade, and its server beside the facade.

They are taken unchanged from the folder that ATROPOS_SRC names.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from conftest import Service

SOURCE = os.environ.get("ATROPOS_SRC")
HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(SOURCE is None, reason="ATROPOS_SRC does not name a checkout of Atropos: NOT TESTED")

atropos = pytest.mark.parametrize("service", [("atropos", 'settle = "ack"')], indirect=True)

# Its tests of the HTTP API. Those in `test_utils` call functions inside its server, and all others are about engines.
OWN_TESTS = ["test_api_legacy.py", "test_api_compression.py", "test_api_messages_handling.py"]


def run(arguments: list[str], **environment: str) -> str:
    assert SOURCE is not None
    paths = os.pathsep.join([SOURCE, str(HERE)])
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=SOURCE,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1", **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=300,
    )
    print(result.stdout)
    assert result.returncode == 0
    return result.stdout


@atropos
def test_its_own_tests_of_the_api_pass(service: Service) -> None:
    tests = [f"atroposlib/tests/{name}" for name in OWN_TESTS]
    options = ["-m", "pytest", "-v", "-p", "atropos_redirect", "-p", "no:cacheprovider"]
    printed = run([*options, *tests], FACADE_URL=service.url)
    assert printed.count(" PASSED ") == 36


@atropos
def test_an_environment_and_the_example_trainer_work_through_it(service: Service) -> None:
    printed = run([str(HERE / "atropos_training.py")], ATROPOS_URL=service.url)
    steps = json.loads(printed[printed.index('{"steps"') :])["steps"]
    assert len(steps) >= 3
    for step in steps:
        assert step["sequences"] == 8
        assert step["trained"] == 8 * 401
        assert step["advantages"] == [-1.342, -0.447, 0.447, 0.0] * 2, "the override holds"
        assert (step["temperatures"], step["logprobs"]) == ([0.5], [-0.5, 1.0])
    items = [item for step in steps for item in step["items"]]
    assert len(set(items)) == len(items), "no group is read twice"


class Both:
    """The original and the facade, which must give the same answers."""

    def __init__(self, original: str, facade: str) -> None:
        self.urls = [original, facade]

    def call(self, method: str, path: str, body: Any = None) -> Any:
        original, facade = (requests.request(method, url + path, json=body, timeout=30) for url in self.urls)
        assert facade.status_code == original.status_code, (path, facade.text)
        if "json" not in original.headers["content-type"]:
            assert facade.text == original.text
            return original.text
        expected, answer = original.json(), facade.json()
        if original.status_code == 422:
            # The original reports all errors, with the input, and the facade the first one.
            places = zip(answer["detail"][0]["loc"], expected["detail"][0]["loc"], strict=False)
            assert all(place == other for place, other in places), (answer, expected)
            return answer
        if path == "/register":
            assert isinstance(answer["uuid"], int)
            return answer
        assert answer == expected, (path, body)
        return answer

    def get(self, path: str, body: Any = None) -> Any:
        return self.call("GET", path, body)

    def post(self, path: str, body: Any) -> Any:
        return self.call("POST", path, body)

    def register(self, batch_size: int) -> None:
        trainer = {
            "wandb_group": "g", "wandb_project": "p", "batch_size": batch_size, "max_token_len": 512,
            "checkpoint_dir": "/tmp/c", "save_checkpoint_interval": 10, "starting_step": 3, "num_steps": 1000,
        }  # fmt: skip
        self.post("/register", trainer)

    def environment(self, name: str, group_size: int, **more: Any) -> Any:
        asked = {"max_token_length": 128, "desired_name": name, "weight": 1.0, "group_size": group_size}
        return self.post("/register-env", {**asked, **more})


@pytest.fixture
def both(service: Service) -> Iterator[Both]:
    assert SOURCE is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(port)]
    original = subprocess.Popen(command, cwd=SOURCE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(200):
            try:
                requests.get(url + "/info", timeout=5)
                break
            except requests.ConnectionError:
                time.sleep(0.1)
        yield Both(url, service.url)
    finally:
        original.terminate()
        original.wait()


def scored(seed: int, sequences: int, **more: Any) -> dict[str, Any]:
    tokens = [[1, 10 + seed, 100 + member, 7] for member in range(sequences)]
    masks = [[-100, -100, *sequence[2:]] for sequence in tokens]
    return {"tokens": tokens, "masks": masks, "scores": [float(member) for member in range(sequences)], **more}


@atropos
def test_calls_without_data_have_the_answers_of_the_original(both: Both) -> None:
    for path in ["/", "/info", "/wandb_info", "/status", "/batch", "/latest_example"]:
        both.get(path)
    both.environment("math", 4)
    both.register(16)
    both.environment("math", 4)
    for path in ["/info", "/wandb_info", "/status", "/batch"]:
        both.get(path)
    for name, weight, share in [("math", 3.0, 0.25), ("code", 1.0, None), ("math", 0.0, 0.5)]:
        both.environment(name, 4, weight=weight, min_batch_allocation=share)
    for env_id in range(3):
        both.get("/status-env", {"env_id": env_id})
    both.post("/disconnect-env", {"env_id": 0})
    for env_id in range(3):
        both.get("/status-env", {"env_id": env_id})
    assert both.get("/reset_data") == "Reset successful"
    # The original forgets to reset `max_token_len` of `/info`, and then answers `/batch` with 500.
    for path in ["/wandb_info", "/status"]:
        both.get(path)


@atropos
def test_groups_have_the_answers_of_the_original(both: Both) -> None:
    both.register(8)
    both.get("/batch")
    both.environment("math", 4)
    everything = {
        "advantages": [[0.5, 1.5], [], [0.25], [1.0]],
        "ref_logprobs": [[-0.123456789012345]] * 4,
        "messages": [[{"role": "user", "content": None, "reward": 1, "x": [1, {"y": "\u00e9"}]}]] * 4,
        "generation_params": {"temperature": 0.5, "stop": ["a"]},
        "inference_logprobs": [[1.0, 1.0, -0.5, -0.25]] * 4,
        "overrides": [{"set_advantage_to_zero": True}, {}, {"a": 1}, {}],
        "group_overrides": {"sft": True},
        "images": {"any": ["thing", None]},
        "distill_token_ids": [[[1, 2]]] * 4,
        "distill_logprobs": [[[-1.0, -2.0]]] * 4,
    }
    both.post("/scored_data", scored(0, 4, env_id=0, **everything))
    both.get("/latest_example")
    both.post("/scored_data", scored(1, 4, unknown="ignored"))
    both.get("/status")
    both.get("/status-env", {"env_id": 0})
    assert both.get("/batch")["batch"] is not None
    both.get("/status")
    odd = [
        {"advantages": [], "images": [], "messages": []},
        {"masks": [[1, 1, 1, 1]] * 8},
        {"masks": [[-100, -100, -100, -100]] * 8, "env_id": 7},
        {"inference_logprobs": [[-1.0]] * 8, "overrides": [{}]},
        {"inference_logprobs": [], "scores": [True, 1, "2", 3.5, 0, 0, 0, 0]},
    ]
    for seed, more in enumerate(odd):
        both.post("/scored_data_list", [{**scored(seed, 8), **more}])
        both.get("/batch")


@atropos
def test_what_the_original_refuses_is_refused(both: Both) -> None:
    good = scored(0, 1)
    bodies: list[Any] = [
        {**good, "messages": [[{"role": "user"}]]},
        {**good, "tokens": [["x"]]},
        {**good, "tokens": 1},
        {**good, "advantages": [1.0]},
        {**good, "overrides": [1]},
        {**good, "group_overrides": []},
        {**good, "env_id": "a"},
        {key: value for key, value in good.items() if key != "scores"},
    ]
    for body in bodies:
        both.post("/scored_data", body)
    both.post("/scored_data_list", good)
    both.post("/scored_data_list", [good, {}])
    both.post("/register", {})
    both.post("/register-env", {"max_token_length": 1, "desired_name": None, "weight": 1, "group_size": 1})
    both.post("/disconnect-env", {})
    both.get("/status-env", {})
    both.get("/status")


@atropos
def test_odd_groups_are_held_and_read_as_by_the_original(both: Both) -> None:
    """The sizes are such that what is held does not depend on which groups are chosen."""
    both.register(12)
    both.get("/batch")
    both.environment("a", 4)
    both.environment("b", 2)
    chance = random.Random(5)
    sequences = 0
    for seed in range(300):
        env_id = chance.randrange(2)
        sizes = [4, 4, 4, 1, 2, 3] if env_id == 0 else [2, 2, 1]
        group = scored(seed, chance.choice(sizes), env_id=env_id)
        if chance.random() < 0.5:
            both.post("/scored_data", group)
        else:
            both.post("/scored_data_list", [group])
        sequences += len(group["tokens"])
        if chance.random() < 0.2:
            both.get("/status")
    assert sequences > 500


@atropos
def test_every_group_of_a_long_run_is_read_once(both: Both) -> None:
    """Batches need not be the same, because the original delivers the newest first."""
    both.register(16)
    both.get("/batch")
    for size in (8, 4, 2):
        both.environment("e", size)
    chance = random.Random(9)
    posted: dict[int, Any] = {}
    for seed in range(400):
        env_id = chance.randrange(3)
        posted[seed] = scored(seed, (8, 4, 2)[env_id], env_id=env_id)
        both.post("/scored_data", posted[seed])
    read: list[int] = []
    for url in both.urls:
        read = []
        while (batch := requests.get(url + "/batch", timeout=30).json()["batch"]) is not None:
            assert sum(len(group["tokens"]) for group in batch) == 16
            for group in batch:
                seed = group["tokens"][0][1] - 10
                assert {key: group[key] for key in posted[seed]} == posted[seed]
                read.append(seed)
        assert len(set(read)) == len(read)
    # The original leaves more, because it delivers only groups that fill up the size of the largest one.
    left = sum(len(group["tokens"]) for seed, group in posted.items() if seed not in set(read))
    assert left < 16
