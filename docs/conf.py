"""The site of the documents, for Sphinx: `make docs` writes it to target/docs.

The sources are the documents as they are, at their places in the checkout, so that the same relative links work on a
forge and on the site. The navigation is the list of docs/README.md. A link to a file that is no page becomes a copy of
the file. `read` changes what Sphinx has no form for: the list, which becomes the navigation, links to folders, and
diagrams that a forge draws.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HOME = "docs/README"
"""The page with the list."""

PAGES = ["*.md", "docs/*.md", "docs/examples/*.md", "docs/recipes/*.md", "examples/*.md", "python/README.md"]
"""The documents that are pages. A page that docs/README.md does not list makes the build fail."""

ADDED = {"How to": "docs/recipes/*.md"}
"""Pages that are in a part of the navigation although docs/README.md lists only their index."""

REPOSITORY = re.search(r'^repository = "(.+)"$', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
"""The address of the checkout on the web, if it has one."""

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)\)")
ITEM = re.compile(r"^- \[([^\]]+)\]\(([^)\s#]+)\)", re.MULTILINE)
DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MOVE = re.compile(r"^\s*(\S+) --> (\S+): (.*)$", re.MULTILINE)

project = "Forebay"
html_title = "Forebay"
language = "en"
root_doc = HOME
extensions = ["myst_parser"]
include_patterns = PAGES
# Folders that Sphinx would search for pages, however long that takes.
exclude_patterns = [
    *(entry.name for entry in ROOT.iterdir() if entry.is_dir() and entry.name not in ("docs", "examples", "python")),
    "python/forebay",
    "python/tests",
]
myst_heading_anchors = 6
html_theme = "furo"
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False
html_theme_options: dict[str, Any] = {"footer_icons": []}


def parts() -> dict[str, list[tuple[str, str]]]:
    """The navigation: for each part of docs/README.md its pages, as titles and names of documents."""
    _, *texts = (ROOT / f"{HOME}.md").read_text().split("\n## ")
    found: dict[str, list[tuple[str, str]]] = {}
    for text in texts:
        caption, _, items = text.partition("\n")
        found[caption] = [
            (title, os.path.normpath(f"docs/{path}").removesuffix(".md"))
            for title, path in ITEM.findall(items)
            if path.endswith(".md")
        ]
    listed = {name for pages in found.values() for _, name in pages}
    for caption, pattern in ADDED.items():
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).with_suffix("").as_posix()
            if name not in listed:
                title = path.read_text().split("\n", 1)[0].removeprefix("# ")
                found[caption].append((title, name))
    return found


def navigation() -> str:
    trees = []
    for caption, pages in parts().items():
        entries = "\n".join(f"{title} </{name}>" for title, name in pages)
        trees.append(f"\n```{{toctree}}\n:caption: {caption}\n:hidden:\n\n{entries}\n```\n")
    return "".join(trees)


def without_folders(folder: Path, text: str) -> str:
    """A folder is no page: a link to one leads to the repository on the web, and without that it is only its text."""

    def linked(found: re.Match[str]) -> str:
        path = folder / found[3]
        if found[1] or not path.is_dir():
            return found[0]
        name = path.resolve().relative_to(ROOT).as_posix()
        return f"[{found[2]}]({REPOSITORY[1]}/tree/main/{name})" if REPOSITORY else found[2]

    return LINK.sub(linked, text)


def as_table(found: re.Match[str]) -> str:
    """The moves of a state diagram, which forges draw with a program that this site does not load."""
    rows = [f"| {start.replace('[*]', '')} | {end} | {why} |" for start, end, why in MOVE.findall(found[1])]
    return "\n".join(["| from | to | by |", "|---|---|---|", *rows])


def read(_: object, name: str, source: list[str]) -> None:
    text = DIAGRAM.sub(as_table, source[0])
    source[0] = without_folders((ROOT / name).parent, text) + (navigation() if name == HOME else "")


def add_first_page(app: Any, error: Exception | None) -> None:
    """The page of the folder, which leads to the list."""
    if error is None:
        page = f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={HOME}.html">'
        (Path(app.outdir) / "index.html").write_text(f'{page}<title>Forebay</title><a href="{HOME}.html">Forebay</a>\n')


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", read)
    app.connect("build-finished", add_first_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
