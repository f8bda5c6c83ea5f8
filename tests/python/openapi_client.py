"""Makes a client from the OpenAPI document, imports all of it, and calls a running service with it.

Usage: openapi_client.py DOCUMENT CONFIGURATION FOLDER URL
"""

import importlib
import pkgutil
import subprocess
import sys

document, configuration, folder, url = sys.argv[1:]
generate = ["generate", "--path", document, "--config", configuration, "--meta", "none"]
made = subprocess.run(
    [sys.executable, "-m", "openapi_python_client", *generate, "--output-path", f"{folder}/forebay_client"],
    capture_output=True,
    text=True,
)
said = made.stdout + made.stderr
assert made.returncode == 0, said
# The generator leaves out what is not one JSON value: rollouts, scores and documents line by line, and rollouts as Arrow. Told to take them as bytes, it
# would make a client that tells the forms of a body apart by `isinstance` of a union, which Python refuses.
unsupported = [line for line in said.splitlines() if line.startswith("Unsupported content type ")]
assert sorted(line.split()[-1] for line in unsupported) == [
    "application/vnd.apache.arrow.stream",
    "application/x-ndjson",
    "application/x-ndjson",
    "application/x-ndjson",
], said
warnings = [line for line in said.splitlines() if line.upper().startswith(("WARNING ", "ERROR "))]
assert sorted(warnings) == [
    "WARNING parsing GET /exports within operations.",
    "WARNING parsing POST /imports/{format} within agents.",
    "WARNING parsing POST /scores within scorers.",
    "WARNING parsing POST /trajectories within agents.",
    "WARNING parsing POST /trajectories within agents.",
], said

sys.path.insert(0, folder)
import forebay_client

for module in pkgutil.walk_packages(forebay_client.__path__, "forebay_client."):
    importlib.import_module(module.name)

from forebay_client.api.agents import post_trajectories
from forebay_client.api.policies import get_policy, put_policy
from forebay_client.api.trainers import lease_batch
from forebay_client.models import BatchRequest, PolicyRules, Problem, Receipt, Segment, Trajectory

client = forebay_client.Client(base_url=url)
rules = PolicyRules.from_dict({"group": {"size": 8}, "advantage": "rloo"})
written = put_policy.sync_detailed("math", client=client, body=rules)
assert written.status_code == 201 and written.parsed.rules.group.size == 8, written
found = get_policy.sync("math", client=client)
assert found.policy == "math" and found.rules.advantage == "rloo", found
nothing = lease_batch.sync_detailed(client=client, body=BatchRequest(policy="math"))
assert nothing.status_code == 204, nothing
refused = get_policy.sync("nobody", client=client)
assert isinstance(refused, Problem) and refused.type_ == "unknown-policy", refused


def rollout(index, reward=1.0):
    segment = Segment(tokens=[1, 2, 3], loss_mask=[1, 1], logprobs=[-0.5, -0.25])
    return Trajectory(policy="math", rollout_id=f"r{index}", group_id="g", reward=reward, segments=[segment])


for status in (201, 200):
    posted = post_trajectories.sync_detailed(client=client, body=rollout(0))
    assert posted.status_code == status and isinstance(posted.parsed, Receipt), posted
    assert posted.parsed.rollout_id == "r0" and posted.parsed.group.arrived == 1, posted
bundle = post_trajectories.sync_detailed(client=client, body=[rollout(index) for index in range(1, 8)])
assert bundle.status_code == 201 and bundle.parsed[-1].group.state == "ready", bundle
conflict = post_trajectories.sync(client=client, body=rollout(0, 0.5))
assert isinstance(conflict, Problem) and conflict.type_ == "rollout-conflict", conflict
leased = lease_batch.sync(client=client, body=BatchRequest(policy="math"))
assert leased.rollouts == 8, leased
