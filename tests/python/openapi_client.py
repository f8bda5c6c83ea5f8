"""Makes a client from the OpenAPI document, imports all of it, and calls a running service with it.

Usage: openapi_client.py DOCUMENT CONFIGURATION FOLDER URL
"""

import importlib
import pkgutil
import subprocess
import sys

document, configuration, folder, url = sys.argv[1:]
generate = ["generate", "--path", document, "--config", configuration, "--meta", "none", "--fail-on-warning"]
made = subprocess.run(
    [sys.executable, "-m", "openapi_python_client", *generate, "--output-path", f"{folder}/forebay_client"],
    capture_output=True,
    text=True,
)
said = made.stdout + made.stderr
assert made.returncode == 0 and "WARNING" not in said.upper(), said

sys.path.insert(0, folder)
import forebay_client

for module in pkgutil.walk_packages(forebay_client.__path__, "forebay_client."):
    importlib.import_module(module.name)

from forebay_client.api.policies import get_policy, put_policy
from forebay_client.api.trainers import lease_batch
from forebay_client.models import BatchRequest, PolicyRules, Problem

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
