"""The site of the documents (`make docs`): it builds without a warning, has every document, and is all on one host."""

from __future__ import annotations

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from support import REPOSITORY

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "embed": "src", "object": "data"}
"""Elements with which a page loads something, and the attribute that has its address. `link` is another one."""

OTHER_HOST = re.compile(r"(?:https?:)?//")
IN_STYLES = re.compile(r"""(?:@import\s+|url\(\s*)["']?((?:https?:)?//[^"')\s]+)""")


class Page(HTMLParser):
    """What a page has: ids, links to other places, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.text = path.read_text()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids.update(found[name] for name in ("id", "name") if name in found)
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") not in ("canonical", "license"):
            self.loaded.append(found["href"])
        elif address := found.get(LOADED.get(tag, "")):
            self.loaded.append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run([REPOSITORY / "scripts" / "site", folder], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert built.stderr == "" or built.stderr.startswith("python-env: ")
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def test_every_document_is_in_the_navigation(site: Path, pages: dict[Path, Page]) -> None:
    home = pages[site / "docs" / "README.html"]
    (navigation,) = re.findall(r'<div class="sidebar-tree">(.*?)</div>', home.text, re.DOTALL)
    entries = {(site / "docs" / link).resolve() for link in re.findall(r'href="([^"#]+)"', navigation)}
    documents = [path for path in (REPOSITORY / "docs").rglob("*.md") if path != REPOSITORY / "docs" / "README.md"]
    assert len(documents) > 25
    missing = [
        path
        for path in documents
        if (site / path.relative_to(REPOSITORY)).with_suffix(".html").resolve() not in entries
    ]
    assert missing == []
    captions = re.findall(r'class="caption-text">([^<]+)<', navigation)
    assert captions[:5] == ["Start", "How to", "Concepts", "Reference", "Operate"]


def test_links_lead_to_files_and_ids_of_the_site(site: Path, pages: dict[Path, Page]) -> None:
    dead: list[str] = []
    count = 0
    for path, page in pages.items():
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            count += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            is_there = target.is_file() and target.is_relative_to(site.resolve())
            if is_there and parts.fragment and target.suffix == ".html":
                is_there = unquote(parts.fragment) in pages[target].ids
            if not is_there:
                dead.append(f"{path.relative_to(site)}: {link}")
    assert dead == []
    assert count > 1_000


def test_no_mark_of_markdown_is_left_in_the_text(site: Path, pages: dict[Path, Page]) -> None:
    """A line of a paragraph that begins with `*` is a list, also inside a code span, and breaks the span."""
    left: list[str] = []
    for path, page in pages.items():
        (article,) = re.findall(r"<article.*?</article>", page.text, re.DOTALL) or [""]
        text = re.sub(r"<(pre|code)\b.*?</\1>|<[^>]+>", "", article, flags=re.DOTALL)
        left += [f"{path.relative_to(site)}: {line}" for line in text.splitlines() if re.search(r"`|\*\*|\]\(", line)]
    assert left == []


def test_nothing_is_loaded_from_other_hosts(site: Path, pages: dict[Path, Page]) -> None:
    foreign = [
        f"{path.relative_to(site)}: {address}"
        for path, page in pages.items()
        for address in page.loaded
        if OTHER_HOST.match(address)
    ]
    styles = [*site.rglob("*.css"), *site.rglob("*.svg"), *pages]
    foreign += [
        f"{path.relative_to(site)}: {found}" for path in styles for found in IN_STYLES.findall(path.read_text())
    ]
    assert foreign == []
    for name in ("searchindex.js", "search.html", "index.html"):
        assert (site / name).is_file()


def test_the_drawing_of_the_states_has_moves_of_the_diagrams() -> None:
    diagrams = "".join(re.findall(r"```mermaid\n(.*?)```", (REPOSITORY / "ARCHITECTURE.md").read_text(), re.DOTALL))
    moves = set(re.findall(r"^ +(\w+) --> (\w+):", diagrams, re.MULTILINE))
    drawn = re.findall(r'data-move="(\w+) (\w+)"', (REPOSITORY / "docs/concepts/states.svg").read_text())
    assert len(drawn) == 10 and set(drawn) <= moves
