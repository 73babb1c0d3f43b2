"""Copies the repository's pages to the folder that Sphinx builds from.

The pages are written to be read on GitHub too, where a link may lead to any
file, and a folder's README.md is its first page. On the site docs/ is the
root, a folder's first page is index.md, and a link to a file that is no page
of the site becomes its text. A link whose text is a page's path, as
internals/sm90.md, gets the page's title.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

# Pages outside docs/: their names on the site, and new titles.
OTHERS = {
    "README.md": ("overview.md", "Overview"),
    "CONTRIBUTING.md": ("contributing.md", "Contributing"),
    "CHANGELOG.md": ("changelog.md", "Changelog"),
}
# Pages of docs/ that only GitHub, or a package index, shows.
LEFT_OUT = ("docs/README.md",)
# Where links to other files lead: to pages that the build makes.
MADE = {
    "docs": "index.md",
    "docs/README.md": "index.md",
    "docs/gallery": "examples/index.rst",
    "docs/gallery/README.rst": "examples/index.rst",
    "reference": "algorithm/index.md",
    "reference/__init__.py": "algorithm/sources.rst",
}
COPIED = {".png", ".json", ".py", ".css", ".rst", ".svg", ".ipynb"}

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def copy(root: Path, site: Path) -> None:
    """Copy all pages; start anew if one of an earlier build is gone.

    Files that did not change keep their time, so that Sphinx builds only what
    did.
    """
    names = site_names(root)
    targets = link_targets(root, names)
    kept = set()
    for source, name in names.items():
        target = site / name
        kept.add(target)
        if source.endswith(".md"):
            text = (root / source).read_text(encoding="utf-8")
            text = with_titles(text, root / source)
            text = with_links(text, source, name, targets)
            if title := OTHERS.get(source, ("", ""))[1]:
                text = re.sub(r"\A# .*", f"# {title}", text)
            if source.endswith("/README.md"):
                text += toctree(text, name, {*targets.values()})
            write(target, text)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / source, target)
    gone = [x for x in copied_before(site) if x not in kept]
    if gone:  # Sphinx would keep what it made of them
        shutil.rmtree(site)
        copy(root, site)


def copied_before(site: Path) -> Iterator[Path]:
    """Yield the pages in Markdown, and the scripts of the gallery."""
    yield from site.rglob("*.md")
    yield from site.glob("gallery/*.py")


def site_names(root: Path) -> dict[str, str]:
    """Return the site's name of each page and picture of the repository."""
    names = {source: name for source, (name, _) in OTHERS.items()}
    for path in sorted((root / "docs").rglob("*")):
        source = path.relative_to(root).as_posix()
        if path.suffix not in {".md", *COPIED} or source in LEFT_OUT:
            continue
        name = path.relative_to(root / "docs").as_posix()
        names[source] = re.sub(r"(^|/)README\.md$", r"\1index.md", name)
    return names


def link_targets(root: Path, names: Mapping[str, str]) -> dict[str, str]:
    """Return the site's page for each file and folder that links may name."""
    folders = {
        str(PurePosixPath(source).parent): name
        for source, name in names.items()
        if source.endswith("/README.md")
    }
    modules = {
        f"reference/{path.name}": f"algorithm/{path.stem}.rst"
        for path in (root / "reference").glob("*.py")
    }
    return {**modules, **folders, **names, **MADE}


def with_links(
    text: str, source: str, page: str, targets: Mapping[str, str]
) -> str:
    """Return the text of a page of the repository, with the site's links."""

    def rewritten(link: re.Match[str]) -> str:
        path, _, anchor = link["target"].partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return link[0]
        file = os.path.normpath(PurePosixPath(source).parent / path)
        if file not in targets:
            return link["text"]
        to = os.path.relpath(targets[file], PurePosixPath(page).parent)
        to += f"#{anchor}" if anchor else ""
        return f"{link['image']}[{link['text']}]({to})"

    return _LINK.sub(rewritten, text)


def with_titles(text: str, source: Path) -> str:
    """Return a page's text, with titles where links are named by paths."""

    def titled(link: re.Match[str]) -> str:
        path = link["target"].partition("#")[0]
        page = source.parent / path
        if not path.endswith(link["text"]) or not page.is_file():
            return link[0]
        title = re.match("# (.*)", page.read_text(encoding="utf-8"))
        return f"[{title[1]}]({link['target']})" if title else link[0]

    return _LINK.sub(titled, text)


def toctree(text: str, name: str, pages: Iterable[str]) -> str:
    """Return a hidden toctree of a folder's pages, for the end of its index.

    In the order in which the index links to them, then by name.
    """
    folder = PurePosixPath(name).parent
    inside = [
        page.stem
        for page in sorted(map(PurePosixPath, pages))
        if page.parent == folder and page.suffix in (".md", ".rst")
    ]
    linked = [PurePosixPath(x["target"]).stem for x in _LINK.finditer(text)]
    ordered = [*dict.fromkeys(x for x in linked if x in inside), *inside]
    entries = [x for x in dict.fromkeys(ordered) if x != "index"]
    if not entries:
        return ""
    return "\n".join(["", "```{toctree}", ":hidden:", "", *entries, "```", ""])


def write(path: Path, text: str) -> None:
    """Write a file unless it has this text already."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
