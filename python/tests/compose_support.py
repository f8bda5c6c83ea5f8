"""What tests of compose files share: reading them as compose does, and checking what any of them must be."""

from __future__ import annotations

import importlib.resources
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import ruamel.yaml
import yaml

from forebay._runner import command

SCHEMA = json.loads(
    importlib.resources.files("check_jsonschema").joinpath("builtin_schemas/vendor/compose-spec.json").read_text()
)

VARIABLES = {
    "FOREBAY_ADMIN_KEY": "the-admin-key",
    "FOREBAY_TRAIN_KEY": "the-train-key",
    "FOREBAY_PRODUCE_KEY": "the-produce-key",
    "FOREBAY_ENGINE_KEY": "the-engine-key",
}
"""What the head of a compose file says is set."""

VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?::(-|\?)([^}]*))?\}|)")
"""What compose replaces in values: `$$`, `${NAME}`, `${NAME:-DEFAULT}` and `${NAME:?ERROR}`."""


def read(text: str) -> dict[str, Any]:
    """The document, which parsers of YAML 1.1 and of YAML 1.2 read alike."""
    found = yaml.safe_load(text)
    assert found == ruamel.yaml.YAML(typ="safe", pure=True).load(text)
    return found


def replaced(value: Any, given: dict[str, str]) -> Any:
    """A document as compose uses it, with variables put in."""
    if isinstance(value, dict):
        return {key: replaced(item, given) for key, item in value.items()}
    if isinstance(value, list):
        return [replaced(item, given) for item in value]
    return VARIABLE.sub(lambda found: put_in(found, given), value) if isinstance(value, str) else value


def put_in(found: re.Match[str], given: dict[str, str]) -> str:
    escaped, name, operator, text = found.groups()
    if escaped:
        return "$"
    assert name, f"a dollar sign without a name in {found.string!r}"
    assert name in given or operator, f"{name} has no default"
    assert given.get(name) or operator != "?", text
    return given.get(name) or text


def checked(text: str) -> dict[str, Any]:
    """The document of a compose file, which has the form of the specification, and is complete."""
    document = read(text)
    jsonschema.Draft7Validator(SCHEMA).validate(document)
    document = replaced(document, VARIABLES)
    services = document["services"]
    assert re.fullmatch(r"[a-z0-9][a-z0-9_-]*", document["name"])
    for name, service in services.items():
        assert re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9._-]*", name)
        assert name not in service.get("depends_on", {})
        assert set(service.get("depends_on", {})) <= set(services)
        for other, after in service.get("depends_on", {}).items():
            assert after["condition"] != "service_healthy" or "healthcheck" in services[other], (name, other)
        volumes = service["volumes"]
        assert {volume["source"] for volume in volumes if volume["type"] == "volume"} <= set(document["volumes"])
        assert len({volume["target"] for volume in volumes}) == len(volumes)
        for config in service.get("configs", []):
            assert config["source"] in document["configs"]
        if service["command"][:3] == ["python", "-m", "forebay.run"]:
            options = command.command_line().parse_args(service["command"][3:])
            assert is_mounted(options.file, service), (options.file, volumes)
    return document


def is_mounted(path: Path, service: dict[str, Any]) -> bool:
    return any(path.is_relative_to(volume["target"]) for volume in service["volumes"])
