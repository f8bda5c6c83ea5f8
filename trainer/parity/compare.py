"""The trainer beside slime's formulas: losses, gradients, moments and weights after some steps, in many configurations.

A service and the trainer run as processes. Each configuration has a policy of its own, whose groups are posted over
HTTP, and the trainer consumes them. PyTorch then makes the same steps from the same checkpoint on what was posted, with
`formulas.py`, or with the functions of a checkout of slime (--slime). Prints a table; fails above --bound.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request

import torch
import transformers
from safetensors.torch import load_file, save_file

import formulas
from cases import CASES

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
MODEL = ROOT / "trainer" / "tests" / "golden" / "llama3-rope" / "checkpoint"
VALUE_HEAD = "score.weight"
GROUPS_PER_BATCH, ROLLOUTS_PER_GROUP = 2, 4
OPTIMIZER = {"beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0}
LEARNING_RATE = 1e-3


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps of each configuration (default: 5)")
    parser.add_argument("--only", default="", help="configurations whose name contains this")
    parser.add_argument("--slime", type=pathlib.Path, help="checkout of slime whose own functions are to be used")
    parser.add_argument("--bound", type=float, default=1e-4, help="largest difference that passes (default: 1e-4)")
    parser.add_argument("--binaries", type=pathlib.Path, default=ROOT / "target" / "debug")
    return parser.parse_args()


class Service:
    """A service on a port of its own, with an empty database."""

    def __init__(self, binaries, folder):
        self.log = folder / "service.log"
        database = f"sqlite:{folder / 'forebay.db'}"
        command = [binaries / "forebay", "serve", "--listen", "127.0.0.1:0", "--database", database, "--log", "json"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.url = self.wait_for_address()

    def wait_for_address(self):
        for _ in range(300):
            for line in self.log.read_text().splitlines():
                event = json.loads(line) if line.startswith("{") else {}
                if event.get("message") == "serving":
                    return "http://" + event["listen"]
            time.sleep(0.1)
        sys.exit(f"the service did not start within 30 seconds:\n{self.log.read_text()}")

    def send(self, method, path, body):
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers, method=method)
        return urllib.request.urlopen(request).read()

    def stop(self):
        self.process.terminate()
        self.process.wait()


class Model:
    """A causal model, or a critic with a scalar head."""

    def __init__(self, folder):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        weights = load_file(folder / "model.safetensors")
        self.value_head = torch.nn.Parameter(weights[VALUE_HEAD]) if VALUE_HEAD in weights else None

    def parameters(self):
        found = dict(self.model.named_parameters())
        if self.value_head is not None:
            del found["lm_head.weight"]
            found[VALUE_HEAD] = self.value_head
        return found

    def __call__(self, rows):
        """Logits or values of each row's whole sequence; every row runs alone."""
        hidden = [self.model.model(row.tokens[None]).last_hidden_state[0] for row in rows]
        if self.value_head is None:
            return [self.model.lm_head(one) for one in hidden]
        return [(one @ self.value_head.T).squeeze(-1) for one in hidden]


class Trained:
    """A model with its optimizer, as slime's recipes have it."""

    def __init__(self, name, folder):
        self.name, self.model = name, Model(folder)
        named = self.model.parameters()
        matrices = [tensor for tensor in named.values() if tensor.dim() >= 2]
        vectors = [tensor for tensor in named.values() if tensor.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": OPTIMIZER["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}],
            lr=LEARNING_RATE,
            betas=(OPTIMIZER["beta1"], OPTIMIZER["beta2"]),
            eps=OPTIMIZER["eps"],
        )

    def step(self, loss):
        """Makes a step; the norm of the gradient before it is clipped."""
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(self.model.parameters().values()), OPTIMIZER["clip_norm"])
        self.optimizer.step()
        return float(norm)

    def moments(self):
        states = {name: self.optimizer.state[tensor] for name, tensor in self.model.parameters().items()}
        found = {f"{self.name}.mean.{name}": state["exp_avg"] for name, state in states.items()}
        return found | {f"{self.name}.square.{name}": state["exp_avg_sq"] for name, state in states.items()}


def checkpoints(folder):
    """The policy's checkpoint and others of its shape: near it, and a critic."""
    base = load_file(MODEL / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    noise = lambda value: 0.05 * torch.randn(value.shape, generator=generator)
    moved = lambda: {name: value + noise(value) for name, value in base.items()}
    critic = {name: value for name, value in base.items() if name != "lm_head.weight"}
    critic[VALUE_HEAD] = 0.3 * torch.randn(1, base["lm_head.weight"].shape[1], generator=generator)
    made = {"policy": base, "reference": moved(), "teacher": moved(), "critic": critic}
    for name, weights in made.items():
        shutil.copytree(MODEL, folder / name)
        save_file(weights, folder / name / "model.safetensors", metadata={"format": "pt"})
    return {name: folder / name for name in made}


def groups(case, steps, folders):
    """Groups of rollouts with masked stretches and several segments, from a policy that differs from the trained one."""
    generator = torch.Generator().manual_seed(2)
    number = lambda low, high: int(torch.randint(low, high, (), generator=generator))
    models = {name: Model(folders[name]) for name in ("policy", "teacher")}
    found = []
    for group in range(steps * case.batches_per_step * GROUPS_PER_BATCH):
        rows = []
        for member in range(ROLLOUTS_PER_GROUP):
            reward = float(torch.rand((), generator=generator))
            for _ in range(2 if member == 1 else 1):
                prompt, response = number(2, 8), number(3, 14)
                mask = (torch.rand(response, generator=generator) > 0.25).float()
                mask[number(0, response)] = 1.0
                row = formulas.Row(
                    group=f"g{group:04}",
                    rollout=f"g{group:04}-{member}",
                    tokens=torch.randint(0, 64, (prompt + response,), generator=generator),
                    mask=torch.ones(response) if case.is_unmasked else mask,
                    reward=reward,
                    temperature=case.temperature,
                )
                with torch.no_grad():
                    logp = {name: formulas.columns(model([row])[0], row)[0] for name, model in models.items()}
                noise = 0.3 * torch.randn(response, generator=generator)
                row.logprobs = (logp["policy"] + noise).clamp(max=-1e-3)
                row.teacher = logp["teacher"]
                if case.advantage == "posted":
                    row.advantages = torch.randn(response, generator=generator)
                rows.append(row)
        found.append(rows)
    return found


def trajectories(policy, rows):
    """A group as its producer posts it."""
    by_rollout = {}
    for row in rows:
        by_rollout.setdefault(row.rollout, []).append(row)
    segment = lambda row: {
        "tokens": row.tokens.tolist(),
        "loss_mask": [int(entry) for entry in row.mask],
        "logprobs": row.logprobs.tolist(),
        "teacher_logprobs": row.teacher.tolist(),
        **({} if row.advantages is None else {"advantages": row.advantages.tolist()}),
    }
    return [
        {
            "policy": policy,
            "rollout_id": rollout,
            "group_id": segments[0].group,
            "policy_version": 0,
            "reward": segments[0].reward,
            "sampling": {"temperature": segments[0].temperature},
            "segments": [segment(row) for row in segments],
        }
        for rollout, segments in by_rollout.items()
    ]


def toml(value):
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(entry)}" for key, entry in value.items()) + " }"
    return json.dumps(value)


def train(case, policy, service, binaries, folders, output, steps):
    """Lets the trainer consume the groups that were posted: its reports, moments and weights."""
    schedule = {"peak": LEARNING_RATE}
    config = {
        "server": service.url,
        "policy": policy,
        "model": str(folders["policy"]),
        "output": str(output),
        "steps": steps,
        "device": "cpu",
        "compute": "float32",
        "objective": case.objective,
        "optimizer": OPTIMIZER,
        "schedule": schedule,
        "memory": case.memory,
        "data": {"batches_per_step": case.batches_per_step},
        "publish": {"every": steps},
    }
    if case.has_critic:
        config["critic"] = {"model": str(folders["critic"]), "optimizer": OPTIMIZER, "schedule": schedule}
    if case.has_reference:
        config["reference"] = str(folders["reference"])
    if case.has_teacher:
        config["teacher"] = str(folders["teacher"])
    output.mkdir()
    path = output / "trainer.toml"
    path.write_text("".join(f"{key} = {toml(value)}\n" for key, value in config.items()))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RUST_LOG": "warn"}
    command = [binaries / "forebay-trainer", "train", "--config", path]
    ended = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=120)
    if ended.returncode != 0:
        sys.exit(f"{case.name}: {ended.stderr.decode()}")
    saved = output / "checkpoints" / f"step-{steps:08}"
    weights = {f"policy.{name}": tensor for name, tensor in load_file(saved / "model" / "model.safetensors").items()}
    if case.has_critic:
        critic = load_file(saved / "critic" / "model.safetensors")
        weights |= {f"critic.{name}": tensor for name, tensor in critic.items()}
    reports = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return reports, load_file(saved / "optimizer.safetensors"), weights


def imitate(case, losses, posted, folders, steps):
    """The same steps in PyTorch: losses and norms of each step, moments and weights at the end."""
    policy = Trained("policy", folders["policy"])
    critic = Trained("critic", folders["critic"]) if case.has_critic else None
    reference = Model(folders["reference"]) if case.has_reference else None
    teacher = Model(folders["teacher"]) if case.has_teacher else None
    frozen = lambda model, rows: [logits.detach() for logits in model(rows)] if model else None
    reports = []
    batches = [sum(posted[at : at + GROUPS_PER_BATCH], []) for at in range(0, len(posted), GROUPS_PER_BATCH)]
    for step in range(steps):
        policy_losses, value_losses = [], []
        for rows in batches[step * case.batches_per_step : (step + 1) * case.batches_per_step]:
            found = losses(
                case, rows, policy.model(rows), frozen(reference, rows), frozen(teacher, rows),
                critic.model(rows) if critic else None,
            )
            policy_losses.append(found[0])
            value_losses.append(found[1])
        loss = sum(policy_losses) / len(policy_losses)
        report = {"loss": loss.item(), "policy_gradient_norm": policy.step(loss)}
        if critic:
            loss = sum(value_losses) / len(value_losses)
            report |= {"value_loss": loss.item(), "critic_gradient_norm": critic.step(loss)}
        reports.append(report)
    models = [model for model in (policy, critic) if model]
    moments = {name: tensor for model in models for name, tensor in model.moments().items()}
    weights = {
        f"{model.name}.{name}": tensor.detach() for model in models for name, tensor in model.model.parameters().items()
    }
    return reports, moments, weights


def differences(ours, theirs):
    """Largest differences: losses and weights absolute, norms relative, moments of the largest entry of their kind."""
    (reports, moments, weights), (expected_reports, expected_moments, expected_weights) = ours, theirs
    assert len(reports) == len(expected_reports), "every step is reported once"
    pairs = lambda suffix: [
        (report[name], value)
        for report, expected in zip(reports, expected_reports)
        for name, value in expected.items()
        if name.endswith(suffix)
    ]
    distance = lambda found, expected: float((found - expected).abs().max())
    moment = 0.0
    for kind in (".mean.", ".square."):
        names = [name for name in expected_moments if kind in name]
        largest = max(float(expected_moments[name].abs().max()) for name in names)
        moment = max(moment, max(distance(moments[name], expected_moments[name]) for name in names) / largest)
    return {
        "loss": max(abs(found - expected) for found, expected in pairs("loss")),
        "gradient": max(abs(found - expected) / expected for found, expected in pairs("gradient_norm")),
        "moments": moment,
        "weights": max(distance(weights[name], expected) for name, expected in expected_weights.items()),
    }


def compare(case, number, losses, service, options, folders, folder):
    policy = f"case-{number}"
    rules = {
        "group": {"size": ROLLOUTS_PER_GROUP},
        "batch": {"groups": GROUPS_PER_BATCH, "order": "fifo"},
        "advantage": case.advantage,
        "loss_weighting": case.weighting,
    }
    service.send("PUT", f"/policies/{policy}", rules)
    posted = groups(case, options.steps, folders)
    for rows in posted:
        service.send("POST", "/trajectories", trajectories(policy, rows))
    ours = train(case, policy, service, options.binaries, folders, folder / policy, options.steps)
    return differences(ours, imitate(case, losses, posted, folders, options.steps))


def main():
    options = arguments()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    losses = formulas.losses
    if options.slime:
        from checkout import Slime

        losses = Slime(options.slime).losses
    worst = {}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        folders = checkpoints(folder)
        service = Service(options.binaries, folder)
        try:
            print("| configuration | loss | gradient norm | moments | weights |\n|---|---|---|---|---|", flush=True)
            chosen = [case for case in CASES if options.only in case.name]
            chosen = [case for case in chosen if not (options.slime and case.is_by_token)]
            for number, case in enumerate(chosen):
                found = compare(case, number, losses, service, options, folders, folder)
                print(f"| {case.name} | " + " | ".join(f"{value:.1e}" for value in found.values()) + " |", flush=True)
                worst = {column: max(value, worst.get(column, 0.0)) for column, value in found.items()}
        finally:
            service.stop()
    print("| **largest** | " + " | ".join(f"{value:.1e}" for value in worst.values()) + " |")
    if max(worst.values()) > options.bound:
        sys.exit(f"a difference is above {options.bound:.0e}")


if __name__ == "__main__":
    main()
