"""The programs of docs/recipes, run as they are printed against a service of their own, and what they have achieved."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import re
import statistics
import subprocess
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import openai
import pytest
from support import REPOSITORY
from test_documents import BLOCK

import forebay
from forebay.testing import Answer, Engine, Request, decode

FOLDER = REPOSITORY / "docs" / "recipes"

STRICT = [sys.executable, "-W", "error"]
"""What runs a program if nothing else is named."""

PAGES = sorted(path.name for path in FOLDER.glob("*.md") if path.name != "README.md")


class Recipes:
    """Runs the programs of a page in a folder, with a service and a scripted engine."""

    def __init__(self, folder: Path, server: forebay.Server, engine: Engine) -> None:
        self.folder = folder
        self.engine = engine
        self.environment = {
            **os.environ,
            "FOREBAY_URL": server.url,
            "OPENAI_BASE_URL": engine.base_url,
            "OPENAI_API_KEY": "none",
            "PYTHONPATH": str(REPOSITORY / "python"),
        }

    @contextlib.contextmanager
    def started(
        self, page: str, *arguments: str, place: int = 0, python: Sequence[str] = STRICT
    ) -> Iterator[subprocess.Popen[str]]:
        """Starts a program, which is killed at the end of the block if it has not ended."""
        script = self.folder / "program.py"
        script.write_text(BLOCK.findall((FOLDER / page).read_text())[place])
        with subprocess.Popen(
            [*python, str(script), *arguments],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as program:
            try:
                yield program
            finally:
                program.kill()

    def run(self, page: str, *arguments: str, place: int = 0, python: Sequence[str] = STRICT) -> str:
        """Runs a program to its end, and returns what it prints."""
        with self.started(page, *arguments, place=place, python=python) as program:
            output, _ = program.communicate(timeout=120)
        assert program.returncode == 0, output
        return output


Script = Callable[[Request], Answer | str]


@pytest.fixture
def recipes(tmp_path: Path) -> Iterator[Callable[[Script], tuple[Recipes, forebay.Client]]]:
    """Starts an engine with a script, and a service that has this engine for its sessions."""
    with contextlib.ExitStack() as stack:

        def start(script: Script) -> tuple[Recipes, forebay.Client]:
            engine = stack.enter_context(Engine(script))
            config = tmp_path / "forebay.toml"
            config.write_text(
                '[sessions]\nlisten = "127.0.0.1:0"\naudit = 0.0\n'
                f'[[upstream]]\nname = "scripted"\nkind = "vllm"\nurls = ["{engine.url}"]\n'
            )
            server = stack.enter_context(forebay.Server(config=config))
            return Recipes(tmp_path, server, engine), stack.enter_context(server.client())

        yield start


def eventually(condition: Callable[[], bool]) -> None:
    """Waits until something has happened that another process does."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_every_page_is_in_the_index_and_is_short() -> None:
    rows = re.findall(r"^\| .* \| \[.*\]\((.*)\) \|$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == PAGES
    for page in PAGES:
        prose = re.sub(r"^```.*?^```$", "", (FOLDER / page).read_text(), flags=re.MULTILINE | re.DOTALL)
        assert len(prose.split()) <= 600, page
        assert f'"{page}"' in Path(__file__).read_text(), f"no test runs {page}"


def test_an_evaluation_makes_a_curve_beside_the_training(
    recipes: Callable[..., tuple[Recipes, forebay.Client]],
) -> None:
    known = {("6 * 7", 2), ("8 * 9", 2), ("8 * 9", 3)}
    """Which version can answer which question."""

    def answer(request: Request) -> str:
        a, b = re.findall(r"\d+", request.text)
        return f"It is {int(a) * int(b)}" if (f"{a} * {b}", current().version) in known else "I do not know"

    recipe, fb = recipes(answer)

    def current() -> forebay.types.PolicyStatus:
        status = fb.get_policy("math")
        assert status is not None
        return status

    def curve() -> list[tuple[int | None, float, bool]]:
        suites = fb.evals("math").suites
        return [(found.step, found.mean, found.complete) for suite in suites for found in suite.versions[::-1]]

    fb.put_policy("math", {"group": {"size": 4}})
    with recipe.started("evaluation.md") as program:
        for version in (1, 2, 3):
            fb.publish("math", version, step=10 * version)
            # `versions` leaves out what is old, so each version is evaluated before the next one is published.
            eventually(lambda version=version: sum(at[2] for at in curve()) == version or program.poll() is not None)
        output, _ = program.communicate(timeout=60)
    assert program.returncode == 0, output
    assert curve() == [(10, 0.0, True), (20, 1.0, True), (30, 0.5, True)]
    lines = output.splitlines()
    assert lines == [
        "step 10: pass@1 0.00, pass@4 0.00",
        "step 20: pass@1 1.00, pass@4 1.00",
        "step 30: pass@1 0.50, pass@4 0.50",
        "  6x7 got worse: 1.00 before, 0.00 now",
    ]
    # Nothing of it is trained.
    assert list(fb.list_groups("math")) == [] and fb.lease("math", partial=True) is None
    rollouts = list(fb.list_trajectories("math", purpose="eval"))
    assert len(rollouts) == 24 == len(recipe.engine.requests)
    # What was evaluated is not evaluated again.
    assert recipe.run("evaluation.md").splitlines() == lines[-2:]
    assert len(recipe.engine.requests) == 24


def test_a_reward_of_parts_teaches_each_part(recipes: Callable[..., tuple[Recipes, forebay.Client]]) -> None:
    count = itertools.count()

    def answer(request: Request) -> str:
        place = next(count) % 4
        if "2+2" in request.text:
            # Right or well formed, never both.
            return "4!!!!!!!!" if place < 2 else "\\boxed{1}"
        # All wrong, at different lengths.
        return "no" * (1 + place)

    recipe, fb = recipes(answer)
    recipe.run("reward-parts.md")
    states = Counter((group.state, group.reason) for group in fb.list_groups("boxed"))
    assert states == {("ready", None): 1, ("discarded", "nothing-to-learn"): 2}
    batch = fb.lease("boxed", wait_ms=10_000)
    assert batch is not None
    assert batch.metrics["components/right/mean"] == batch.metrics["components/form/mean"] == 0.5
    # What is right counts twice as much as what is well formed.
    right, also_right, formed, also_formed = (row.advantage for row in fb.samples(batch.batch_id))
    assert right == also_right == -formed == -also_formed
    assert right == pytest.approx(3**0.5 / 2, abs=1e-5)


def test_tasks_of_middling_pass_rates_are_played_most(recipes: Callable[..., tuple[Recipes, forebay.Client]]) -> None:
    count = itertools.count()

    def answer(request: Request) -> str:
        if "2+2" in request.text:
            return "4"
        if "123*456" in request.text or next(count) % 2:
            return "I do not know"
        return "42 or 391"

    recipe, fb = recipes(answer)
    recipe.run("curriculum.md")
    groups = list(fb.list_groups("math"))
    played = Counter(group.group_id.partition("@")[0] for group in groups)
    assert sum(played.values()) == 24 and set(played) == {"2+2", "6*7", "17*23", "123*456"}
    assert played["6*7"] + played["17*23"] >= 18, played
    found = {(group.group_id.partition("@")[0], group.state, group.reason, group.reward_mean) for group in groups}
    assert found == {
        ("2+2", "discarded", "flat", 1.0),
        ("123*456", "discarded", "flat", 0.0),
        ("6*7", "ready", None, 0.5),
        ("17*23", "ready", None, 0.5),
    }


def test_everything_is_kept_and_can_be_imported_elsewhere(
    recipes: Callable[..., tuple[Recipes, forebay.Client]],
) -> None:
    recipe, fb = recipes(lambda _: "")

    def play(name: str, **fields: object) -> None:
        segment = forebay.Segment(tokens=[1, 2, 3], loss_mask=[1, 1], logprobs=[-0.5, -0.5])
        fb.post({"policy": "math", "rollout_id": name, "segments": [segment], **fields})

    def train(step: int) -> None:
        run = forebay.Trainer("math", client=fb, last_saved=step - 1 or None)
        batch = run.lease(wait_s=0)
        assert batch is not None
        batch.ack(step)
        run.saved(step)

    def purged(name: str) -> bool:
        story = fb.get_trajectory("math", name)
        return story is not None and story.purged_at is not None

    fb.put_policy("math", {"retention": {"settled_s": 0}})
    play("before", reward=1.0)
    train(1)
    eventually(lambda: purged("before"))
    assert recipe.run("keep-everything.md").splitlines()[-1] == "1 rollouts have no payload any more"
    play("after", reward=1.0)
    play("dropped")
    train(2)
    play("waiting", reward=0.0)
    output = recipe.run("keep-everything.md")
    assert output.splitlines()[-1] == "1 rollouts have no payload any more", output
    status = fb.get_policy("math")
    assert status is not None and status.rules.retention == forebay.types.RetentionRules(
        trained_s=315_360_000, settled_s=315_360_000, dropped_s=315_360_000, tombstone_s=315_360_000
    )
    # The states say that a checkpoint has settled the first of them, and that another one was dropped.
    kept = {found.trajectory.rollout_id: found.result.state for found in fb.export("math")}
    assert kept == {"after": "checkpointed", "dropped": "dropped", "waiting": "ready"}
    with forebay.Server() as other, other.client() as copy:
        copy.put_policy("math", {})
        command = [sys.executable, "-m", "forebay", "import", "--format", "forebay", "math.ndjson"]
        environment = {**recipe.environment, "FOREBAY_URL": other.url}
        subprocess.run(command, cwd=recipe.folder, env=environment, check=True)
        assert {story.rollout_id: story.verdict for story in copy.list_trajectories("math")} == {
            "after": "kept", "dropped": "dropped", "waiting": "kept",
        }  # fmt: skip


def test_two_models_learn_from_the_same_rollouts(recipes: Callable[..., tuple[Recipes, forebay.Client]]) -> None:
    count = itertools.count()
    recipe, fb = recipes(lambda _: "It is 42" if next(count) % 4 else "I do not know")
    # Lines of two threads may come without a break between them.
    lines = re.findall(r"(?:large|small): step \d has learned from \d rows", recipe.run("two-trainers.md"))
    assert sorted(lines) == [
        f"{policy}: step {step} has learned from 4 rows" for policy in ("large", "small") for step in (1, 2, 3)
    ]
    stories = {policy: list(fb.list_trajectories(policy)) for policy in ("large", "small")}
    for found in stories.values():
        assert [story.step for story in found] == [1] * 4 + [2] * 4 + [3] * 4
        assert {story.state for story in found} == {"checkpointed"}
    for one, other in zip(*stories.values(), strict=True):
        assert (one.execution_id, one.reward, one.advantage) == (other.execution_id, other.reward, other.advantage)
        contents = [fb.get_content(story.policy, story.rollout_id) for story in (one, other)]
        assert contents[0] is not None and contents[1] is not None
        assert contents[0].window is not None and contents[0].window == contents[1].window
    assert len(recipe.engine.requests) == 12

    assert recipe.run("two-trainers.md", place=1) == "another trainer has taken over: this one ends\n"
    status = fb.get_policy("large")
    assert status is not None and status.epoch == 3


def test_a_reward_may_come_after_the_service_was_restarted(tmp_path: Path) -> None:
    database = f"sqlite:{tmp_path / 'late.db'}"
    config = tmp_path / "forebay.toml"
    with Engine(lambda _: "Press the button") as engine:
        config.write_text(
            '[sessions]\nlisten = "127.0.0.1:0"\n'
            f'[[upstream]]\nname = "scripted"\nkind = "vllm"\nurls = ["{engine.url}"]\n'
        )
        server = forebay.Server(config=config, database=database).start()
        output = Recipes(tmp_path, server, engine).run("late-rewards.md", "work")
        server.kill()
        assert output.splitlines() == [f"ticket-17-{attempt} waits for its reward" for attempt in (0, 1)]
        with forebay.Server(config=config, database=database) as server, server.client() as fb:
            recipe = Recipes(tmp_path, server, engine)
            assert len(list(fb.list_trajectories("helpdesk", state="scoring"))) == 2
            first = recipe.run("late-rewards.md", "judge", "ticket-17-1", "1.0")
            assert first == "ticket-17-1 is kept, its group open\n"
            for arguments, why in (
                ([], "python3 late.py judge ROLLOUT REWARD"),
                (["judge"], "python3 late.py judge ROLLOUT REWARD"),
                (["judge", "ticket-18-0", "1.0"], "helpdesk has no rollout ticket-18-0"),
                (["judge", "ticket-17-1", "0.5"], "ticket-17-1 was judged before, and this changes nothing"),
            ):
                with recipe.started("late-rewards.md", *arguments) as program:
                    said = program.communicate(timeout=60)[0]
                assert why in said and "Traceback" not in said and program.returncode == 1
            # It was delivered again.
            assert recipe.run("late-rewards.md", "judge", "ticket-17-1", "1.0") == first
            assert (
                recipe.run("late-rewards.md", "judge", "ticket-17-0", "0") == "ticket-17-0 is kept, its group ready\n"
            )
            batch = fb.lease("helpdesk")
            assert batch is not None
            rows = {row.rollout_id: row for row in fb.samples(batch.batch_id)}
            assert {name: row.reward for name, row in rows.items()} == {"ticket-17-0": 0.0, "ticket-17-1": 1.0}
            assert all("Press the button" in decode(row.tokens or ()) for row in rows.values())


@pytest.mark.parametrize("drift", [False, True])
def test_each_turn_has_its_own_credit(recipes: Callable[..., tuple[Recipes, forebay.Client]], drift: bool) -> None:
    script = iter(["It is 42", "It is 43", "I do not know", "It is 43"])
    # If an answer comes back in other ids, each turn is a segment of its own.
    recipe, fb = recipes(lambda _: Answer(next(script), drift=drift))
    lines = recipe.run("credit-per-turn.md").splitlines()
    (batch,) = fb.list_batches("calculator")
    assert (batch.state, batch.step) == ("trained", 1)
    printed = [[float(number) for number in re.findall(r"-?\d+\.\d+", line.split("[")[1])] for line in lines]
    # The returns are 1.9 and 1 for the first rollout, and 0.9 and 1 for the second.
    returns = [1.9, 1.0, 0.9, 1.0]
    deviation = statistics.stdev(returns)
    expected = iter([round((value - statistics.fmean(returns)) / deviation, 3) for value in returns])
    answers = iter(["It is 42", "It is 43", "I do not know", "It is 43"])
    for row, of_tokens in zip(fb.samples(batch.batch_id), printed, strict=True):
        response = (row.tokens or [])[-row.response_length :]
        trained = [token for token, bit in zip(response, row.loss_mask or [], strict=True) if bit]
        for _ in range(1 if drift else 2):
            answer, advantage = next(answers), next(expected)
            # The tokens of a turn are equal, and are those of what was sampled.
            length = next((at for at, one in enumerate(of_tokens) if abs(one - advantage) > 0.002), len(of_tokens))
            assert decode(trained[:length]).startswith(answer) and length > 0
            trained, of_tokens = trained[length:], of_tokens[length:]
        assert not trained
    assert next(answers, None) is None


def test_good_sessions_become_a_supervised_data_set(recipes: Callable[..., tuple[Recipes, forebay.Client]]) -> None:
    recipe, fb = recipes(lambda request: "def add(a, b)" if "two numbers" in request.text else "I do not know")
    fb.put_policy("coder", {})
    for question, reward in (("Add two numbers", 1.0), ("Cure the flu", 0.0)):
        with fb.session("coder") as s:
            with openai.OpenAI(base_url=s.base_url, api_key=s.key) as llm:
                llm.chat.completions.create(model="policy", messages=[{"role": "user", "content": question}])
            s.reward = reward
    assert recipe.run("sft-dataset.md").splitlines()[-1] == "1 segments of 1 rollouts"
    (line,) = map(json.loads, (recipe.folder / "sft.jsonl").read_text().splitlines())
    assert len(line["input_ids"]) == len(line["labels"])
    learned = [label for label in line["labels"] if label != -100]
    assert decode(learned).startswith("def add(a, b)") and "Add two numbers" in decode(line["input_ids"])
    assert "numbers" not in decode(learned)

    assert recipe.run("sft-dataset.md", place=1).splitlines()[1:] == ["def add(a, b)", "def add(a, b)"]
    rows = [json.loads(line) for line in (recipe.folder / "chats.jsonl").read_text().splitlines()]
    asked = [row["messages"][0] for row in rows]
    assert asked == [
        {"role": "user", "content": text} for text in ("Add two numbers", "Write a function that adds two numbers.")
    ]


@pytest.fixture(scope="module")
def trackers() -> str:
    """The interpreter of the environment that has the trackers."""
    command = [str(REPOSITORY / "scripts" / "python-env"), "trackers"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


READ = {
    "wandb": """
import json, pathlib, subprocess, sys
(file,) = pathlib.Path("wandb").glob("offline-run-*/*.wandb")
lines = subprocess.run([sys.executable, READER, str(file)], check=True, stdout=subprocess.PIPE, text=True).stdout
for record in map(json.loads, lines.splitlines()):
    if record["kind"] == "history":
        items = record["history"]["item"]
        # Names of which a part is behind a slash come as they are.
        row = {item.get("key") or ".".join(item["nested_key"]): json.loads(item["value_json"]) for item in items}
        print(json.dumps({name: value for name, value in row.items() if not name.startswith("_")}))
""",
    "mlflow": """
import json, mlflow
(run,) = mlflow.search_runs(experiment_names=["math"], output_format="list")
client = mlflow.MlflowClient()
rows = {}
for name in run.data.metrics:
    for metric in client.get_metric_history(run.info.run_id, name):
        rows.setdefault(metric.step, {"step": metric.step})[name] = metric.value
for step in sorted(rows):
    print(json.dumps(rows[step]))
""",
    "trackio": """
import json, sqlite3
for step, metrics in sqlite3.connect("trackio/math.db").execute("SELECT step, metrics FROM metrics ORDER BY step"):
    print(json.dumps({"step": step, **json.loads(metrics)}))
""",
}
"""Programs that print the rows of each tracker, as a line of JSON for each step."""


@pytest.mark.parametrize("name", READ)
def test_a_tracker_has_the_numbers_of_each_step(
    recipes: Callable[..., tuple[Recipes, forebay.Client]], trackers: str, name: str
) -> None:
    recipe, fb = recipes(lambda _: "")
    fb.put_policy("math", {"group": {"size": 2}})
    recipe.environment |= {
        "HOME": str(recipe.folder),
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": (recipe.folder / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "TRACKIO_DIR": str(recipe.folder / "trackio"),
    }
    segment = forebay.Segment(tokens=[1, 2, 3], loss_mask=[1, 1], logprobs=[-0.5, -1.5])
    for group in range(3):
        for place in range(2):
            fb.post({
                "policy": "math", "group_id": f"{group}", "reward": float(place * group),
                "reward_components": {"tests: all": float(place)}, "segments": [segment],
            })  # fmt: skip
    recipe.run("trackers.md", name, python=[trackers])
    read = READ[name].replace("READER", repr(str(REPOSITORY / "trainer/tests/it/read_wandb.py")))
    found = subprocess.run(
        [trackers, "-c", read], cwd=recipe.folder, env=recipe.environment, stdout=subprocess.PIPE, text=True, check=True
    )
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    assert [(row["step"], row["version"], row["reward/trained"], row["batch/tokens"]) for row in rows] == [
        (1, 1, 0.0, 6), (2, 2, 0.5, 6), (3, 3, 1.0, 6),
    ]  # fmt: skip
    component = "components/tests_ all/mean" if name == "mlflow" else "components/tests: all/mean"
    assert all(row[component] == 0.5 and row["batch/attempt"] == 1 and "batch/waited_s" in row for row in rows)
    # Both rollouts of a group have the same tokens and opposite advantages, so the loss is 0.
    assert all(abs(row["loss"]) < 1e-6 for row in rows)
    assert [step.reward_trained for step in fb.list_steps("math")] == [0.0, 0.5, 1.0]


class Together(forebay.Trainer):
    """The trainer of one rank."""

    def together(self, call: Callable[[], object]) -> object:
        return call()


def test_the_loop_of_ddp_acks_before_it_updates_and_saves_before_it_says_so(
    own_server: forebay.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop of "ddp.md" as it is printed, without PyTorch: frameworks/test_ddp.py runs all of it, on two ranks."""
    calls: list[str] = []
    """What the loop did to the weights, and what the service knew then."""

    with own_server.client() as fb:

        def known() -> tuple[int, int | None]:
            acked = [batch.step for batch in fb.list_batches("ddp") if batch.state in ("trained", "checkpointed")]
            status = fb.get_policy("ddp")
            assert status is not None
            return max((step for step in acked if step is not None), default=0), status.checkpoint_step

        class Optimizer:
            updates_max = 3

            def step(self) -> None:
                if calls.count("update") == self.updates_max:
                    raise KeyboardInterrupt
                calls.append("update")
                assert known()[0] == expected.pop(0), "the ack comes before the update"

            def zero_grad(self) -> None:
                calls.append("discard")

            def state_dict(self) -> dict[str, object]:
                return {}

        def save(content: dict[str, object], file: IO[bytes]) -> None:
            if "opt" in content:
                assert known()[1] != content["step"], "the step is on disk before the service knows it"
            pickle.dump(content, file)

        def pack(batch: forebay.Batch, max_tokens: int) -> list[object]:
            if lost:
                lost.clear()
                assert batch.descriptor.lease is not None
                fb.nack(batch.batch_id, lease=batch.descriptor.lease)
            return []

        torch = types.ModuleType("torch")
        distributed = types.ModuleType("torch.distributed")
        parallel = types.ModuleType("torch.nn.parallel")
        vars(torch).update(save=save, distributed=distributed)
        vars(distributed).update(get_rank=lambda: 0)
        vars(parallel).update(DistributedDataParallel=None)
        ours = types.SimpleNamespace(pack=pack)
        for name, module in {
            "torch": torch,
            "torch.distributed": distributed,
            "torch.nn": types.ModuleType("torch.nn"),
            "torch.nn.parallel": parallel,
            "forebay.torch": ours,
        }.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(forebay, "torch", ours, raising=False)
        monkeypatch.chdir(tmp_path)
        (block,) = BLOCK.findall((FOLDER / "ddp.md").read_text())
        program: dict[str, Any] = {"__name__": "ddp"}
        exec(compile(block, "ddp.py", "exec"), program)
        model = types.SimpleNamespace(module=types.SimpleNamespace(state_dict=dict))

        fb.put_policy("ddp", {})
        for number in range(6):
            segment = forebay.Segment(tokens=[1, 2], loss_mask=[1])
            fb.post({"policy": "ddp", "rollout_id": f"{number}", "reward": 1.0, "segments": [segment]})
        lost: list[bool] = []
        expected = [1, 2, 3]
        with Together("ddp", client=fb) as run, pytest.raises(KeyboardInterrupt):
            program["train"](run, model, Optimizer(), 0)
        # Step 4 is acked, and the weights have not learned from it.
        assert known() == (4, 2) and calls == ["update", "discard"] * 3
        batches = {batch.step: batch.batch_id for batch in fb.list_batches("ddp")}

        calls.clear()
        lost.append(True)
        expected = [3, 4, 5, 6]
        Optimizer.updates_max = 6
        with (tmp_path / "weights" / "saved.pt").open("rb") as file:
            saved = pickle.load(file)["step"]
        with Together("ddp", client=fb, last_saved=saved) as run:
            program["train"](run, model, Optimizer(), saved)
        # The lease of the first batch was lost, so its gradients were discarded, and it came again.
        assert calls == ["discard", *["update", "discard"] * 4] and known() == (6, 6)
        again = {batch.step: batch.batch_id for batch in fb.list_batches("ddp")}
        assert all(again[step] == batch_id for step, batch_id in batches.items())
        status = fb.get_policy("ddp")
        assert status is not None and (status.version, status.version_step) == (6, 6)
