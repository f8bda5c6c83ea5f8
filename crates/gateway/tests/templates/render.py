"""Renders templates as transformers does, for `scripts/template-fixtures`."""

import datetime
import json
import pathlib
import sys

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

FOLDER = pathlib.Path(__file__).parent
CLOCK = datetime.datetime.fromtimestamp(1_700_000_000, datetime.timezone.utc)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """The filter of transformers: Jinja2's own escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def message(sent):
    """A message as engines pass it on: content is a text, and arguments are objects."""
    shown = {key: value for key, value in sent.items()}
    if shown.get("content") is None:
        shown["content"] = ""
    if "tool_calls" in shown:
        shown["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in shown["tool_calls"]
        ]
    return shown


def render(template, case):
    return template.render(
        messages=[message(sent) for sent in case["messages"]],
        tools=case.get("tools"),
        documents=None,
        add_generation_prompt=case.get("opens_answer", True),
        bos_token="<s>",
        **case.get("variables", {}),
    )


def main():
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = CLOCK.strftime
    cases = json.loads((FOLDER / "cases.json").read_text(encoding="utf-8"))
    rendered = []
    for path in sorted(FOLDER.glob("*.jinja")):
        template = environment.from_string(path.read_text(encoding="utf-8"))
        for case in cases:
            try:
                text = render(template, case)
            except jinja2.exceptions.TemplateError:
                # The words of an error are not compared.
                text = None
            rendered.append({"template": path.name, "case": case["name"], "text": text})
    written = json.dumps(rendered, ensure_ascii=False, indent=1) + "\n"
    target = FOLDER / "rendered.json"
    if sys.argv[1:] == ["--check"]:
        if not target.exists() or target.read_text(encoding="utf-8") != written:
            sys.exit(f"{target} is not what Jinja2 {jinja2.__version__} renders; run scripts/template-fixtures")
        return
    target.write_text(written, encoding="utf-8")
    print(f"{len(rendered)} texts, of which {sum(entry['text'] is None for entry in rendered)} refused")


if __name__ == "__main__":
    main()
