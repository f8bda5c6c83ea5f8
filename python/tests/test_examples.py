"""The programs of examples/: a scripted engine, the program, a real service, and the rows that a trainer leases.

Each test is a group small enough to be worked out by hand. Advantages are (reward - mean) / (standard deviation with
divisor n - 1, plus 1e-6), and a rollout's weight is that of its row in the batch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from examples_support import EXAMPLES, PRECISE, chains_of, client

import forebay
from forebay._runner import program, programs, settings, tables
from forebay._runner.output import Output
from forebay._runner.program import Run
from forebay._runner.tiny import Vocabulary
from forebay.testing import Answer, Engine, Request

FILES = sorted(path for path in EXAMPLES.glob("*.toml") if path.name != "defaults.toml")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_run_files_are_valid_and_the_alphabet_has_what_models_read_and_say(path: Path) -> None:
    found = settings.read(path)
    world = program.load_world(found.task.world)
    vocabulary = Vocabulary(world.ALPHABET)
    assert len(vocabulary.ids) == 54
    for policy in found.policies:
        # The swarm composes its advantages itself, a student gets them from its teacher, and an actor from its critic.
        # Only one example compares turns.
        by_turn = {"kind": "turn_return", "gamma": 0.0, "outcome": False}
        other = {"exam_swarm": "reward", "student": "none", "actor": "none", "turn_credit": by_turn}
        assert policy.rules["advantage"] == other.get(path.stem, other.get(policy.name, "grpo"))
        if policy.warm is None:
            assert path.stem in ("asymmetric_ppo", "demo", "late_judge")
            continue

        def put(name: str, **fields: object) -> str:
            return program.prompt(found.task, name, **fields)

        made = world.demos(policy.warm.demos, policy.warm.right, random.Random(1), put)
        for messages in itertools.islice(made, 200):
            tokens, mask = vocabulary.demonstration(messages)
            assert 2 <= sum(mask) <= 12 and len(tokens) < 32
    assert settings.read(path, profile="qwen").engines[0].kind == "sglang"


def test_the_run_file_of_the_readme_is_valid() -> None:
    (block,) = re.findall(r"^```toml\n(.*?)^```$", (EXAMPLES / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    file = EXAMPLES / "readme.toml"
    with pytest.MonkeyPatch.context() as patch:
        read = tables.load
        patch.setattr(settings, "load", lambda path: tables.parsed(block, path) if path == file else read(path))
        found = settings.read(file, profile="qwen")
    assert [policy.name for policy in found.policies] == ["generator", "verifier.0", "verifier.1"]
    assert (found.minutes, found.policies[2].rules["group"]["min_size"]) == (600, 2)


def test_demonstrations_are_right_about_as_often_as_they_should_be(example: Any) -> None:
    world = example("generator_verifier").run.world

    def put(name: str, q: Any, a: str = "", c: str = "") -> str:
        return f"{q.gold}{q.grade(a):.0f}"

    for role, right, least, most in [
        # One guess of ten is right by chance, and one of two verdicts.
        ("generator", 0.5, 0.52, 0.58),
        ("verifier", 0.5, 0.72, 0.78),
        ("generator", 1.0, 1.0, 1.0),
    ]:
        made = list(itertools.islice(world.demos(f"sums.{role}", right, random.Random(1), put), 4_000))
        prompts = [messages[0]["content"] for messages in made]
        said = [messages[1]["content"] for messages in made]
        gold = [prompt[0] if role == "generator" else "ny"[int(prompt[1])] for prompt in prompts]
        share = sum(answer == expected for answer, expected in zip(said, gold, strict=True)) / len(made)
        assert least <= share <= most, role


def test_generator_verifier_rewards_the_verifier_with_its_chains_second_answer(example: Any) -> None:
    system = example("generator_verifier")
    system.policy("generator", 2, 3)
    system.policy("verifier", 1, 3)
    # Three chains: the first answers are right, wrong, wrong, and the second ones are right, right, wrong. The chains
    # run in threads, so the script goes by what a call says.
    first = iter(["2", "3", "4"])
    second = {"7+5|2|y": "2", "7+5|3|y": "2", "7+5|4|n": "4"}

    def script(request: Request) -> str:
        if request.text == "7+5":
            return next(first)
        if request.text in second:
            return second[request.text]
        return "n" if request.text.endswith("4") else "y"

    with Engine(script) as engine, client(engine) as llm:
        b = system.program.execute(system.run, system.fb, llm, system.question("7+5", "2"), chains=3)
        assert all(request.body["max_tokens"] == 4 for request in engine.requests)
    assert {receipt.verdict for receipt in b.receipts} == {"kept"}
    assert len({rollout.trajectory().group_id for rollout in b.rollouts}) == 3

    generator, verifier = system.rows("generator"), system.rows("verifier")
    chains: dict[str, tuple[float, ...]] = {}
    for g1, v, g2 in chains_of(b):
        rows = generator[g1.rollout_id], verifier[v.rollout_id], generator[g2.rollout_id]
        said = forebay.testing.decode(g1.turns[0].tokens)
        assert [row.advantage for row in rows[1:]] == [rows[1].advantage] * 2
        assert [row.reward for row in rows] == [g1.reward, g2.reward, g2.reward]
        assert v.reward_components == {"verdict": float(said != "3")}
        chains[said] = tuple(row.advantage for row in rows)
        # A batch of two groups of three rollouts of two trained tokens, and one of one such group.
        assert [row.loss_weight for row in rows] == [pytest.approx(w, abs=1e-7) for w in (1 / 12, 1 / 6, 1 / 12)]
    high, low = 0.5773493, -0.5773493
    assert chains["2"] == pytest.approx((1.1546985, high, high), abs=PRECISE)
    assert chains["3"] == pytest.approx((low, high, high), abs=PRECISE)
    assert chains["4"] == pytest.approx((low, -1.1546985, -1.1546985), abs=PRECISE)


def test_generator_verifier_gives_up_what_a_failed_call_leaves_without_an_outcome(example: Any) -> None:
    system = example("generator_verifier")
    system.policy("generator", 2, 3)
    system.policy("verifier", 1, 3)
    answers = iter(["2", "3", "4"])

    def script(request: Request) -> Answer | str:
        if request.text == "7+5":
            return next(answers)
        if request.text == "7+5|4":
            return Answer("the engine has no room", status=400)
        return "2" if request.text == "7+5|3|y" else "y"

    with Engine(script) as engine, client(engine) as llm:
        b = system.program.execute(system.run, system.fb, llm, system.question("7+5", "2"), chains=3)
    verdicts = {
        forebay.testing.decode(g1.turns[0].tokens): [r.trajectory().status for r in (g1, v, g2)]
        for g1, v, g2 in chains_of(b)
    }
    assert verdicts == {"2": [None] * 3, "3": [None] * 3, "4": [None, "aborted", "aborted"]}
    # The round 1 of the failed chain is an answer like the others, and the other groups have shrunk.
    rewards = sorted(row.reward for row in system.rows("generator").values())
    assert rewards == [0.0, 0.0, 0.0, 1.0, 1.0]
    assert sorted(row.advantage for row in system.rows("verifier").values()) == pytest.approx(
        [-0.7071058, 0.7071058], abs=PRECISE
    )


def test_demo_rewards_the_share_of_a_sum_that_is_right(example: Any) -> None:
    system = example("demo")
    system.policy("default", 1, 2)
    answers = iter(["12", "15"])
    with Engine(lambda _: next(answers)) as engine, client(engine) as llm:
        b = system.program.execute(system.run, system.fb, llm, system.question("7+5", "12"), count=2)
        assert {request.text for request in engine.requests} == {"7+5="}
    rows = sorted(system.rows("default").values(), key=lambda row: row.reward)
    assert [row.reward for row in rows] == pytest.approx([1 / 3, 1])
    assert [row.advantage for row in rows] == pytest.approx([-0.7071053, 0.7071053], abs=PRECISE)
    assert [row.loss_weight for row in rows] == pytest.approx([1 / 6, 1 / 6])
    assert sorted(rollout.reward_components["gold"] for rollout in b.rollouts) == [0.0, 1.0]


def test_demo_does_not_train_what_its_tool_says(example: Any) -> None:
    system = example("demo", profile="lookup")
    system.policy("default", 1, 3)
    calls = iter(["?3", "?3", "?4"])
    results = iter(["7", "1"])
    with Engine(lambda request: next(results if request.text == "7" else calls)) as engine, client(engine) as llm:
        system.program.execute(system.run, system.fb, llm, system.question("3", "7"), count=3)
        assert {request.text for request in engine.requests} == {"3>", "7"}
    rows = sorted(system.rows("default").values(), key=lambda row: row.reward)
    # A wrong key in the call, a wrong result said again, and all right.
    assert [row.reward for row in rows] == pytest.approx([0.2, 0.6, 1])
    call, result = [1, 1, 1], [1, 1]
    for row, mask in zip(rows, [call, [*call, 0, 0, 0, 0, *result], [*call, 0, 0, 0, 0, *result]], strict=True):
        assert list(row.loss_mask) == mask
        assert row.loss_weight == pytest.approx(1 / (3 * sum(mask)))


def test_asymmetric_ppo_posts_groups_of_one_with_partial_credit_and_without_advantages(example: Any) -> None:
    system = example("asymmetric_ppo")
    rules = system.found.policy("actor").rules
    system.fb.put_policy("actor", {**rules, "batch": {"groups": 4}})
    answers = iter(["12", "15", "120", "7"])
    with Engine(lambda _: next(answers)) as engine, client(engine) as llm:
        q = system.question("7+5", "12")
        rollouts = [system.program.execute(system.run, system.fb, llm, q) for _ in range(4)]
        assert {request.text for request in engine.requests} == {"7+5="}
    found = system.rows("actor")
    rows = [found[rollout.rollout_id] for rollout in rollouts]
    assert [row.reward for row in rows] == pytest.approx([1, 1 / 3, 2 / 3, 0])
    assert [row.advantage for row in rows] == [0.0] * 4
    assert len({row.group_id for row in rows}) == 4
    # Two digits with their end, three digits without it, and one digit with its end.
    assert [row.loss_weight for row in rows] == pytest.approx([1 / 12, 1 / 12, 1 / 12, 1 / 8])
    assert [rollout.reward_components["gold"] for rollout in rollouts] == [1.0, 0.0, 0.0, 0.0]
    assert [rollout.status for rollout in rollouts] == ["completed", "completed", "truncated", "completed"]


def test_asymmetric_ppo_gives_credit_up_to_the_first_mistake(example: Any) -> None:
    share_right = example("asymmetric_ppo").run.world.share_right
    assert share_right("12", True, "12") == 1.0
    assert share_right("12", False, "12") == share_right("120", False, "12") == pytest.approx(2 / 3)
    assert share_right("1", True, "12") == pytest.approx(1 / 3)
    assert share_right("21", True, "12") == share_right("", True, "12") == 0.0
    assert (share_right("7", True, "7"), share_right("7", False, "7")) == (1.0, 0.5)


def test_asymmetric_ppo_starts_its_critic_from_a_smaller_model(example: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("FOREBAY_TRAINER_BIN", sys.executable)  # The command is read here, and never run.
    found = example("asymmetric_ppo").found
    with contextlib.closing(Output(tmp_path / "run", {}, resume=False)) as output:
        models = {"actor": tmp_path / "actor", "critic": tmp_path / "critic"}
        made = programs.trainer(found, found.policy("actor"), output, models, "http://127.0.0.1:1")
    config = tables.load(Path(made.command[-1]))
    assert (config["model"], config["critic"]["model"]) == (str(models["actor"]), str(models["critic"]))
    rates = config["schedule"]["peak"], config["critic"]["schedule"]["peak"]
    assert rates == (1e-3, 3e-3)
    sizes = [(policy.model.hidden, policy.model.layers) for policy in found.policies]
    assert sizes == [(64, 2), (32, 1)]
    assert config["objective"]["objective"] == "ppo"


def test_the_page_on_writing_a_run_is_a_run(own_server: forebay.Server, tmp_path: Path, monkeypatch: Any) -> None:
    page = (EXAMPLES / "writing-your-own.md").read_text()
    blocks = re.findall(r"^## \d\. [^`\n]*`([^`]+)`\n\n```\w+\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in blocks] == ["world.py", "greater.py", "greater.toml"]
    for name, text in blocks:
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = Run(settings.read(tmp_path / "greater.toml"))
    # The programs of examples/ have another module of this name.
    sys.modules.pop("world")
    greater = importlib.import_module("greater")
    vocabulary = Vocabulary(run.world.ALPHABET)
    warm = run.settings.policy("player").warm
    assert warm is not None
    put = functools.partial(program.prompt, run.task)
    demos = list(itertools.islice(run.world.demos(warm.demos, warm.right, random.Random(1), put), 400))
    right = 0
    for user, assistant in demos:
        assert set(user["content"] + assistant["content"]) <= set(vocabulary.ids)
        right += assistant["content"] == str(max(map(int, user["content"].split(","))))
    # On purpose, or by chance.
    assert 0.45 < right / len(demos) < 0.65
    q, answers = run.world.Question("7,3", "7", "q"), itertools.cycle("7333")
    with own_server.client() as fb, Engine(lambda _: next(answers)) as engine:
        fb.put_policy("player", {**run.settings.policy("player").rules, "batch": {"groups": 1}})
        with client(engine) as llm:
            greater.execute(run, fb, llm, q)
        batch = fb.lease("player", wait_ms=10_000)
        assert batch is not None
        rows = fb.samples(batch.batch_id)
        assert sorted(row.reward for row in rows) == [0.0] * 12 + [1.0] * 4
        assert batch.metrics["components/gold/mean"] == 0.25
