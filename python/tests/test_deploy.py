"""What an operator starts with: the chart as Helm renders it, the proxies, and the Grafana of compose.yaml."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import socket
import subprocess
import tarfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support import REPOSITORY

import forebay
from forebay.testing import Answer, Engine

CHART = REPOSITORY / "deploy" / "helm" / "forebay"

DOCUMENT = REPOSITORY / "docs" / "deploy.md"

KUBERNETES = ("1.30", "1.37")
"""The oldest version that the chart accepts, and the newest whose schemas are known here."""

CONFIG = """\
payloads = "objects"

[objects]
url = "s3://bucket/forebay"

[limits]
shutdown_s = 20

[sessions]
listen = "0.0.0.0:8081"

[[upstream]]
name = "qwen"
kind = "sglang"
urls = ["http://10.0.0.5:30000"]

[facades]
atropos = "0.0.0.0:8000"
slime = { listen = "0.0.0.0:8889", policy = "default" }

[[policy]]
name = "default"
"""

POSTGRES: dict[str, Any] = {"image": {"repository": "registry.example/forebay"}, "postgres": {"secret": "database"}}

SQLITE: dict[str, Any] = {
    "image": {"repository": "registry.example/forebay"},
    "replicas": 1,
    "sqlite": {"enabled": True, "storageClass": "local"},
}

FULL: dict[str, Any] = {
    "image": {"repository": "registry.example/forebay", "tag": "main", "pullSecrets": ["registry"]},
    "postgres": {"secret": "database", "key": "address"},
    "config": CONFIG,
    "envSecrets": ["bucket"],
    "env": [{"name": "AWS_REGION", "value": "eu-central-1"}],
    "volumes": [{"name": "authority", "secret": {"secretName": "authority"}}],
    "volumeMounts": [{"name": "authority", "mountPath": "/etc/ssl/database", "readOnly": True}],
    "serviceAccount": "forebay",
    "priorityClassName": "services",
    "nodeSelector": {"pool": "services"},
    "tolerations": [{"key": "dedicated", "operator": "Exists"}],
    "ingress": {
        "enabled": True,
        "host": "forebay.example",
        "agentsHost": "agents.example",
        "tlsSecret": "certificate",
    },
    "monitoring": {
        "serviceMonitor": True,
        "keySecret": "prometheus",
        "prometheusRule": True,
        "dashboard": True,
        "labels": {"release": "prometheus"},
    },
}

SETS = {"postgres": POSTGRES, "sqlite": SQLITE, "full": FULL}

DEFAULTS = {
    name: int(value.replace("_", ""))
    for name, value in re.findall(
        r"^(\w+) = ([0-9_]+)$", (REPOSITORY / "configs" / "forebay.toml").read_text(), re.MULTILINE
    )
}
"""Settings of the service that are numbers."""

LONGEST_POLL_S = 60

ANNOTATIONS = {
    "proxy-body-size": r"\d+[kmg]?",
    "proxy-read-timeout": r"\d+",
    "proxy-send-timeout": r"\d+",
    "proxy-request-buffering": "on|off",
    "proxy-buffering": "on|off",
}
"""Annotations of ingress-nginx and the values that it accepts, from its documentation and its validators."""


@pytest.fixture(scope="module")
def helm() -> str:
    found = subprocess.run([REPOSITORY / "scripts" / "helm-bin"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


Render = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def render(helm: str, tmp_path_factory: pytest.TempPathFactory) -> Render:
    """Renders the chart with values, each set once."""
    folder = tmp_path_factory.mktemp("values")
    known: dict[str, list[dict[str, Any]]] = {}

    def rendered(values: dict[str, Any], release: str = "forebay") -> list[dict[str, Any]]:
        text = json.dumps(values)
        if release + text not in known:
            path = folder / f"{len(known)}.json"
            path.write_text(text)
            command = [helm, "template", release, CHART, "--namespace", "rl", "--values", path]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            known[release + text] = [document for document in yaml.safe_load_all(done.stdout) if document]
        return copy.deepcopy(known[release + text])

    return rendered


def of_kind(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = (document for document in documents if document["kind"] == kind)
    return found


def pods(documents: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield of_kind(documents, "Deployment")["spec"]["template"]["spec"]
    yield of_kind(documents, "CronJob")["spec"]["jobTemplate"]["spec"]["template"]["spec"]


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod["containers"]
    return found


def configuration(documents: list[dict[str, Any]]) -> str:
    (found,) = (document["data"] for document in documents if "forebay.toml" in document.get("data", {}))
    return found["forebay.toml"]


def program() -> str:
    return os.environ["FOREBAY_BIN"]


# What Kubernetes accepts.


@pytest.mark.parametrize("name", SETS)
def test_helm_finds_nothing_to_complain_about(name: str, helm: str, tmp_path: Path) -> None:
    (tmp_path / "values.json").write_text(json.dumps(SETS[name]))
    command = [helm, "lint", "--strict", CHART, "--values", tmp_path / "values.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", SETS)
def test_kubernetes_knows_every_field(name: str, version: str, render: Render) -> None:
    kinds = []
    for document in render(SETS[name]):
        kinds.append(document["kind"])
        if document["apiVersion"] == "monitoring.coreos.com/v1":
            continue
        kubernetes_validate.validate(document, version, strict=True)
    always = ["ConfigMap", "CronJob", "Deployment", "Service"]
    others = {
        "postgres": ["PodDisruptionBudget"],
        "sqlite": ["PersistentVolumeClaim"],
        "full": ["ConfigMap", "Ingress", "PodDisruptionBudget", "PrometheusRule", "ServiceMonitor"],
    }
    assert sorted(kinds) == sorted(always + others[name])


def test_the_strict_schemas_refuse_a_mistyped_field(render: Render) -> None:
    deployment = of_kind(render(POSTGRES), "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
        kubernetes_validate.validate(deployment, KUBERNETES[1], strict=True)


@pytest.mark.parametrize("release", ["forebay", "a" * 53, "forebay-" + "a" * 45])
def test_names_are_as_short_as_kubernetes_wants_them(release: str, render: Render) -> None:
    for document in render(FULL, release=release):
        name = document["metadata"]["name"]
        assert re.fullmatch("[a-z0-9]([-a-z0-9]*[a-z0-9])?", name)
        assert len(name) <= (52 if document["kind"] == "CronJob" else 63)


@pytest.mark.parametrize("name", SETS)
def test_everything_that_is_referred_to_exists(name: str, render: Render) -> None:
    documents = render(SETS[name])
    names = {(document["kind"], document["metadata"]["name"]) for document in documents}
    given = {"address", "authority", "bucket", "certificate", "database", "prometheus", "registry", "url", "key"}
    for pod in pods(documents):
        found = container(pod)
        mounted = [mount["name"] for mount in found.get("volumeMounts", [])]
        assert sorted(mounted) == sorted(volume["name"] for volume in pod.get("volumes", []))
        for volume in pod.get("volumes", []):
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in names
            elif "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in names
            else:
                assert volume["secret"]["secretName"] in given
        for variable in found["env"]:
            if "valueFrom" in variable:
                assert set(variable["valueFrom"]["secretKeyRef"].values()) <= given
    deployment = of_kind(documents, "Deployment")["spec"]
    labels = deployment["template"]["metadata"]["labels"].items()
    service = of_kind(documents, "Service")
    assert deployment["selector"]["matchLabels"].items() <= labels
    assert service["spec"]["selector"].items() <= labels
    # The job of the first key is no endpoint of the Service.
    job = of_kind(documents, "CronJob")["spec"]["jobTemplate"]["spec"]["template"]["metadata"]["labels"]
    assert not service["spec"]["selector"].items() <= job.items()
    ports = {port["name"]: port["containerPort"] for port in container(next(pods(documents)))["ports"]}
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports
    expected = {"http": 8080} | ({"agents": 8081, "atropos": 8000, "slime": 8889} if name == "full" else {})
    assert ports == expected


# What the service accepts.


@pytest.mark.parametrize("name", SETS)
def test_the_program_knows_its_variables_and_its_configuration(name: str, render: Render, tmp_path: Path) -> None:
    documents = render(SETS[name])
    serving, creating = (container(pod) for pod in pods(documents))
    for found, command in ((serving, ["serve"]), (creating, ["keys", "create"])):
        assert found["args"][: len(command)] == command
        helped = subprocess.run([program(), *command, "--help"], capture_output=True, text=True, check=True).stdout
        known = set(re.findall(r"\[env: (\w+)", helped))
        ours = {variable["name"] for variable in found["env"] if variable["name"].startswith("FOREBAY_")}
        assert "FOREBAY_DATABASE" in ours and ours <= known
    (tmp_path / "forebay.toml").write_text(configuration(documents))
    checked = subprocess.run([program(), "check-config", tmp_path / "forebay.toml"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    mount = next(mount for mount in serving["volumeMounts"] if mount["name"] == "config")
    variables = {variable["name"]: variable.get("value") for variable in serving["env"]}
    assert variables["FOREBAY_CONFIG"] == f"{mount['mountPath']}/forebay.toml"


def test_pods_have_more_time_to_stop_than_requests_have_to_finish(render: Render) -> None:
    for values, shutdown in ((POSTGRES, 30), (FULL, 20)):
        pod = next(pods(render(values)))
        pause = container(pod)["lifecycle"]["preStop"]["sleep"]["seconds"]
        # After the requests, the database is closed.
        assert pod["terminationGracePeriodSeconds"] > pause + 2 * shutdown


@pytest.mark.parametrize("name", SETS)
def test_pods_have_no_privileges(name: str, render: Render) -> None:
    for pod in pods(render(SETS[name])):
        assert not pod["automountServiceAccountToken"] and not pod["enableServiceLinks"]
        # The user `nonroot` of the image.
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 65532
        assert container(pod)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_replicas_of_postgres_are_replaced_one_by_one_and_that_of_sqlite_at_once(render: Render) -> None:
    replicated = of_kind(render(POSTGRES), "Deployment")["spec"]
    assert replicated["replicas"] == 3
    assert replicated["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    alone = of_kind(render(SQLITE), "Deployment")["spec"]
    assert (alone["replicas"], alone["strategy"]) == (1, {"type": "Recreate"})


def test_a_changed_configuration_replaces_the_pods(render: Render) -> None:
    digests = {
        of_kind(render({**POSTGRES, "config": config}), "Deployment")["spec"]["template"]["metadata"]["annotations"][
            "checksum/config"
        ]
        for config in ("", "auto_create = true\n", "auto_create = false\n")
    }
    assert len(digests) == 3


def test_annotations_of_ingress_nginx_are_known_and_enough_for_the_service(render: Render) -> None:
    found = of_kind(render(FULL), "Ingress")["metadata"]["annotations"]
    short = {name.removeprefix("nginx.ingress.kubernetes.io/"): value for name, value in found.items()}
    assert set(short) == set(ANNOTATIONS)
    assert all(re.fullmatch(ANNOTATIONS[name], value) for name, value in short.items())
    assert short["proxy-body-size"] == f"{DEFAULTS['body_bytes'] >> 20}m"
    assert int(short["proxy-read-timeout"]) > DEFAULTS["hold_s"]
    assert int(short["proxy-send-timeout"]) >= DEFAULTS["body_timeout_s"]
    assert short["proxy-buffering"] == short["proxy-request-buffering"] == "off"


# What the chart refuses.


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no image": ({**POSTGRES, "image": {}}, "image.repository is empty"),
    "no database": ({**POSTGRES, "postgres": {}}, "no database"),
    "two databases": ({**SQLITE, "postgres": {"secret": "database"}}, "choose one database"),
    "replicas of SQLite": ({**SQLITE, "replicas": 2}, "only one process can serve a SQLite database: set replicas=1"),
    "a mistyped value": ({**POSTGRES, "replica": 3}, "replica"),
    "a mistyped value inside": ({**POSTGRES, "postgres": {"secretName": "database"}}, "secretName"),
    "a number as text": ({**POSTGRES, "replicas": "3"}, "replicas"),
    "no host": ({**POSTGRES, "ingress": {"enabled": True}}, "ingress.enabled needs ingress.host"),
    "agents without sessions": (
        {**POSTGRES, "ingress": {"enabled": True, "host": "a.example", "agentsHost": "b.example"}},
        "ingress.agentsHost needs `listen` in",
    ),
    "metrics without a key": (
        {**POSTGRES, "monitoring": {"serviceMonitor": True}},
        "monitoring.serviceMonitor needs monitoring.keySecret",
    ),
    "no TOML": ({**POSTGRES, "config": "a = = 3"}, "config is not TOML"),
    "an address of the service": ({**POSTGRES, "config": 'listen = "0.0.0.0:80"'}, "config sets `listen`"),
    "a database in the file": ({**POSTGRES, "config": 'database = "sqlite:a"'}, "config sets `database`"),
    "certificates": ({**POSTGRES, "config": "[tls]"}, "leaves encryption to the ingress"),
    "a listener of the pod alone": (
        {**POSTGRES, "config": '[sessions]\nlisten = "127.0.0.1:8081"'},
        "`agents` of config has the address 127.0.0.1:8081, which the Service cannot reach",
    ),
    "a variable of the chart": (
        {**POSTGRES, "env": [{"name": "FOREBAY_LISTEN", "value": "0.0.0.0:80"}]},
        "/env/0/name|env.0.name",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_chart_refuses(name: str, helm: str, tmp_path: Path) -> None:
    values, message = REFUSED[name]
    (tmp_path / "values.json").write_text(json.dumps(values))
    command = [helm, "template", "forebay", CHART, "--values", tmp_path / "values.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0 and any(part in done.stderr for part in message.split("|")), done.stderr


# What the chart takes from other files.


def test_the_version_is_that_of_the_program() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    (version,) = re.findall(r'^version = "(.*)"$', (REPOSITORY / "Cargo.toml").read_text(), re.MULTILINE)
    assert chart["version"] == chart["appVersion"] == version


def test_the_image_has_the_version_unless_the_values_name_a_tag(render: Render) -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    for values, tag in ((POSTGRES, version), (FULL, "main")):
        images = {container(pod)["image"] for pod in pods(render(values))}
        assert images == {f"registry.example/forebay:{tag}"}


def test_prometheus_and_grafana_get_the_files_of_the_folder_configs(render: Render) -> None:
    documents = render(FULL, release="training")
    alerts = yaml.safe_load((REPOSITORY / "configs" / "alerts.yml").read_text())
    rule = of_kind(documents, "PrometheusRule")
    assert rule["spec"] == alerts
    (shown,) = (document for document in documents if document["metadata"]["name"].endswith("-dashboard"))
    assert shown["data"] == {"forebay.json": (REPOSITORY / "configs" / "grafana-dashboard.json").read_text()}
    monitor = of_kind(documents, "ServiceMonitor")
    for document in (rule, monitor, shown):
        assert document["metadata"]["labels"]["release"] == "prometheus"
    spec = monitor["spec"]
    labels = of_kind(documents, "Service")["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    # The operator takes the job of the series from this label, and the alerts select the job.
    assert f'job="{labels[spec["jobLabel"]]}"' in (REPOSITORY / "configs" / "alerts.yml").read_text()
    (endpoint,) = spec["endpoints"]
    scraped = yaml.safe_load((REPOSITORY / "configs" / "prometheus.yml").read_text())
    (job,) = scraped["scrape_configs"]
    assert endpoint == {
        "port": "http",
        "path": job["metrics_path"],
        "interval": scraped["global"]["scrape_interval"],
        "scrapeTimeout": job["scrape_timeout"],
        "authorization": {"credentials": {"name": "prometheus", "key": "key"}},
    }
    assert set(spec) == {"jobLabel", "selector", "endpoints"}


def test_a_packed_chart_has_these_files_too(helm: str, tmp_path: Path) -> None:
    subprocess.run([helm, "package", CHART, "--destination", tmp_path], check=True, capture_output=True)
    (packed,) = tmp_path.glob("*.tgz")
    with tarfile.open(packed) as archive:
        for name in ("alerts.yml", "grafana-dashboard.json"):
            found = archive.extractfile(f"forebay/{name}")
            assert found is not None and found.read() == (REPOSITORY / "configs" / name).read_bytes()


def test_the_document_has_the_commands_of_the_notes() -> None:
    notes = (CHART / "templates" / "NOTES.txt").read_text()
    notes = notes.replace(" {{ $in }}", "").replace("{{ $name }}", "forebay")
    commands = re.findall(r"^  (kubectl .*)$", notes, re.MULTILINE)
    assert len(commands) == 4
    assert [command for command in commands if f"\n{command}\n" not in DOCUMENT.read_text()] == []


def test_the_values_of_the_document_are_enough(render: Render) -> None:
    (text,) = re.findall(r"^```\n(image:\n.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    documents = render(yaml.safe_load(text))
    assert of_kind(documents, "Ingress")["spec"]["rules"][0]["host"] == "forebay.example"
    assert "header_timeout_s = 75 " in configuration(documents)


# The pods of SQLite, played as processes.


DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def status(url: str, key: str | None = None) -> int:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with DIRECT.open(request, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def eventually(holds: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_service_starts_after_the_job_of_the_first_key(render: Render, tmp_path: Path) -> None:
    documents = render({**SQLITE, "config": '[[policy]]\nname = "math"\n'})
    (tmp_path / "config").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "config" / "forebay.toml").write_text(configuration(documents))
    port = free_port()
    # Only folders and the port are replaced.
    swaps = {"/etc/forebay": f"{tmp_path}/config", "/data": f"{tmp_path}/data", ":8080": f":{port}"}

    def command(pod: dict[str, Any]) -> dict[str, Any]:
        variables = {}
        for variable in container(pod)["env"]:
            value = variable["value"]
            for old, new in swaps.items():
                value = value.replace(old, new)
            variables[variable["name"]] = value
        return {"args": [program(), *container(pod)["args"]], "env": variables, "text": True}

    serving, creating = (command(pod) for pod in pods(documents))
    refused = subprocess.run(**serving, capture_output=True, timeout=60)
    assert refused.returncode == 1 and "there are no keys" in refused.stderr
    # A job's log has both outputs.
    created = subprocess.run(**creating, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
    assert created.returncode == 0, created.stdout
    (key,) = (line for line in created.stdout.splitlines() if line.startswith("fb_"))
    probes = container(next(pods(documents)))
    with subprocess.Popen(**serving, stderr=subprocess.DEVNULL) as service:
        try:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                path = probes[probe]["httpGet"]["path"]
                eventually(lambda path=path: status(f"http://127.0.0.1:{port}{path}") == 200)
            assert status(f"http://127.0.0.1:{port}/policies/math") == 401
            assert status(f"http://127.0.0.1:{port}/policies/math", key) == 200
            assert status(f"http://127.0.0.1:{port}/metrics", key) == 200
        finally:
            service.send_signal(signal.SIGTERM)
        assert service.wait(timeout=60) == 0


# The compose file.


def test_grafana_shows_the_dashboard_without_a_click() -> None:
    services = yaml.safe_load((REPOSITORY / "compose.yaml").read_text())["services"]
    grafana = services["grafana"]
    mounts = {target: source for source, target, _ in (volume.split(":") for volume in grafana["volumes"])}

    def mounted(target: str) -> Path:
        return REPOSITORY / mounts[target]

    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert mounted(home) == REPOSITORY / "configs" / "grafana-dashboard.json"
    (source,) = yaml.safe_load(mounted("/etc/grafana/provisioning/datasources/forebay.yml").read_text())["datasources"]
    dashboard = json.loads(mounted(home).read_text())
    (variable,) = (each for each in dashboard["templating"]["list"] if each["type"] == "datasource")
    # The dashboard takes the default source of this type.
    assert (source["type"], source["isDefault"]) == (variable["query"], True)
    name, port = source["url"].removeprefix("http://").split(":")
    assert f"127.0.0.1:{port}:{port}" in services[name]["ports"]
    (folder,) = yaml.safe_load(mounted("/etc/grafana/provisioning/dashboards/forebay.yml").read_text())["providers"]
    assert Path(home).parent == Path(folder["options"]["path"])


# The proxies.


@dataclass
class Proxied:
    """A service behind a proxy, which has names that only `curl` knows."""

    service: forebay.Server
    folder: Path
    port: int
    may_answer: threading.Event

    def curl(self, host: str, path: str, *options: str | Path) -> list[str]:
        resolved = f"{host}:{self.port}:127.0.0.1"
        command = ["curl", "--noproxy", "*", "--silent", "--show-error", "--max-time", "90", "--resolve", resolved]
        command += ["--cacert", str(self.folder / "forebay.pem"), *map(str, options)]
        return [*command, f"https://{host}:{self.port}{path}"]

    def post(self, path: str, body: Any, *options: str) -> tuple[int, str]:
        (self.folder / "body.json").write_text(json.dumps(body))
        sent = ("--data-binary", f"@{self.folder / 'body.json'}", "--header", "content-type: application/json")
        command = self.curl("forebay.example", path, *sent, "--write-out", "\n%{http_code}", *options)
        text, code = subprocess.run(command, check=True, capture_output=True, text=True).stdout.rsplit("\n", 1)
        return int(code), text


def start_nginx(folder: Path, text: str) -> list[str]:
    places = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"    {place}_temp_path {folder}/{place};\n" for place in places)
    (folder / "nginx.conf").write_text(text.replace("http {\n", "http {\n" + temporary))
    return ["-e", "stderr", "-c", f"{folder}/nginx.conf", "-g", f"daemon off; pid {folder}/nginx.pid;"]


def start_haproxy(folder: Path, text: str) -> list[str]:
    (folder / "haproxy.cfg").write_text(text)
    return ["-db", "-f", f"{folder}/haproxy.cfg"]


def seconds(text: str, name: str) -> list[int]:
    return [int(found) for found in re.findall(rf"^\s*{name} (\d+)s;?$", text, re.MULTILINE)]


def test_proxies_wait_longer_than_the_service_and_keep_idle_connections_for_less_time() -> None:
    nginx, haproxy = ((REPOSITORY / "deploy" / name).read_text() for name in ("nginx.conf", "haproxy.cfg"))
    for waits in (seconds(nginx, "proxy_read_timeout"), seconds(haproxy, "timeout server")):
        api, agents = waits
        assert api > LONGEST_POLL_S and agents > DEFAULTS["hold_s"]
    for idle in (seconds(nginx, "keepalive_timeout"), seconds(haproxy, "timeout http-keep-alive")):
        assert max(idle) < DEFAULTS["header_timeout_s"]
    assert re.findall(r"client_max_body_size (\d+)m;", nginx) == [str(DEFAULTS["body_bytes"] >> 20), "32"]


PROXIES = {"nginx": ("nginx.conf", start_nginx), "haproxy": ("haproxy.cfg", start_haproxy)}


@pytest.fixture(params=PROXIES)
def proxied(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Proxied]:
    """A service behind a proxy with its file of deploy/. Only names of files, addresses and ports are replaced."""
    file, start = PROXIES[request.param]
    found = subprocess.run([REPOSITORY / "scripts" / "proxy-bin", request.param], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    name = "subjectAltName=DNS:forebay.example,DNS:agents.example"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    made += ["-keyout", "forebay.key", "-out", "forebay.pem", "-subj", "/CN=forebay.example", "-addext", name]
    subprocess.run(made, cwd=tmp_path, check=True, capture_output=True)
    certificate = (tmp_path / "forebay.pem").read_text()
    (tmp_path / "both.pem").write_text(certificate + (tmp_path / "forebay.key").read_text())
    may_answer = threading.Event()

    def waits() -> None:
        assert may_answer.wait(60)

    agents, port = free_port(), free_port()
    with Engine(lambda _: Answer("late", before=waits), kind="sglang") as engine:
        (tmp_path / "forebay.toml").write_text(
            f"""
            [access]
            hosts = ["forebay.example", "agents.example"]
            [sessions]
            listen = "127.0.0.1:{agents}"
            public_url = "https://agents.example"
            keep_alive_s = 1
            audit = 0.0
            [[upstream]]
            name = "scripted"
            kind = "sglang"
            urls = ["{engine.url}"]
            """
        )
        with forebay.Server(config=tmp_path / "forebay.toml") as service:
            text = (REPOSITORY / "deploy" / file).read_text()
            swaps = {
                "/etc/nginx/forebay": f"{tmp_path}/forebay",
                "/etc/haproxy/forebay.pem": f"{tmp_path}/both.pem",
                "listen 443": f"listen 127.0.0.1:{port}",
                "bind :443": f"bind 127.0.0.1:{port}",
                "port 8080": f"port {service.url.rsplit(':', 1)[1]}",
                ":8080 max": f":{service.url.rsplit(':', 1)[1]} max",
                ":8080\n": f":{service.url.rsplit(':', 1)[1]}\n",
                ":8081": f":{agents}",
            }
            for old, new in swaps.items():
                text = text.replace(old, new)
            text = re.sub(r"\b10\.0\.0\.\d\b", "127.0.0.1", text)
            with (tmp_path / "log").open("w") as log:
                options = start(tmp_path, text)
                proxy = subprocess.Popen([found.stdout.strip(), *options], stdout=log, stderr=log)
            try:
                here = Proxied(service, tmp_path, port, may_answer)
                ready = here.curl("forebay.example", "/readyz", "--fail")
                eventually(lambda: subprocess.run(ready, capture_output=True).returncode == 0)
                yield here
            finally:
                may_answer.set()
                proxy.terminate()
                proxy.wait(60)
            complaints = (tmp_path / "log").read_text()
            assert not re.search(r"\[(error|crit|alert|emerg|ALERT|WARNING)\]|is DOWN", complaints), complaints


def test_a_proxy_passes_long_polls_large_bodies_and_streams(proxied: Proxied) -> None:
    wait_s = 2
    begun = time.monotonic()
    assert proxied.post("/batches", {"wait_ms": wait_s * 1000})[0] == 204
    assert time.monotonic() - begun >= wait_s

    # 40 MiB in 40 rollouts.
    tokens = [100_000 + number % 800_000 for number in range(135_000)]
    rollouts = [
        {"rollout_id": f"r{number}", "reward": 1.0, "segments": [{"tokens": tokens, "loss_mask": [1]}]}
        for number in range(40)
    ]
    code, answer = proxied.post("/trajectories", rollouts)
    assert (proxied.folder / "body.json").stat().st_size > 40 * 2**20
    assert code == 201 and answer.count('"kept"') == 40, answer[:1000]

    # Until the engine answers, the client gets an event without content, which a proxy with buffers would keep.
    with proxied.service.client() as fb:
        session = fb.session("default")
        assert session.base_url.startswith("https://agents.example/")
        path = session.base_url.removeprefix("https://agents.example")
        body = json.dumps({"model": "policy", "stream": True, "messages": [{"role": "user", "content": "hi"}]})
        (proxied.folder / "call.json").write_text(body)
        headers = ("--header", f"Authorization: Bearer {session.key}", "--header", "content-type: application/json")
        sent = ("--no-buffer", "--data-binary", f"@{proxied.folder / 'call.json'}")
        command = proxied.curl("agents.example", f"{path}/chat/completions", *headers, *sent)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as call:
            assert call.stdout is not None
            first = call.stdout.readline()
            assert '"content":""' in first and not proxied.may_answer.is_set()
            proxied.may_answer.set()
            rest = call.stdout.read()
        assert call.returncode == 0 and "data: [DONE]" in rest and "lat" in rest
        session.finish()
