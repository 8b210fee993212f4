"""One executed notebook as a fragment of our page: nbconvert with a body-only template, ids unique in the page."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from html import unescape
from importlib.resources import files
from typing import Any

from nbconvert.exporters import HTMLExporter
from nbconvert.preprocessors import CoalesceStreamsPreprocessor
from traitlets.config import Config

from perfbook.report import safe
from perfbook.report.evidence import hidden

_HEADING = re.compile(r"<h([1-6])[^>]*>(.*?)</h\1>", re.DOTALL)
_EMPTY_HEADER = re.compile(r"<th[^>]*>\s*</th>")  # pandas' corner: names nothing
_ANCHOR = re.compile(r'<a class="anchor-link"[^>]*>.*?</a>')  # nbconvert's own; ours are unique in the page
_MARKUP = re.compile(r"<[^>]+>")
TOP = 3  # headings of a notebook start here: the page's title is h1, each notebook's own title h2


@dataclass(frozen=True)
class Heading:
    """A heading inside a notebook's section."""

    id: str
    text: str
    level: int


@dataclass(frozen=True)
class Fragment:
    """A notebook's section.

    Attributes
    ----------
    title : str
        The notebook's first heading, without markup; its name where it has none.
    html : str
        Sanitised body without that heading.
    headings : tuple of Heading
        What the table of contents lists.
    cell_texts : dict
        Cell anchor → text of its outputs, for links to the cell that says something.
    error_id : str
        Anchor of the cell that ended with an error; empty when none did.
    """

    title: str
    html: str
    headings: tuple[Heading, ...]
    cell_texts: dict[str, str]
    error_id: str = ""


def fragment(name: str, content: Any, scrub: Callable[[str], str]) -> Fragment:
    """Convert an executed notebook.

    Parameters
    ----------
    name : str
        Its name: prefix of every id.
    content : NotebookNode
        The notebook; not changed.
    scrub : callable
        Takes machine paths out of a text.
    """
    notebook = copy.deepcopy(content)
    notebook.cells = [_prepared(cell, scrub) for cell in notebook.cells if not hidden(cell)]
    for index, cell in enumerate(notebook.cells):
        cell.metadata["anchor"] = f"{name}-{cell.get('id') or index}"
    body, _ = _exporter().from_notebook_node(notebook)
    body = _ANCHOR.sub("", body)
    body = _EMPTY_HEADER.sub("<td></td>", body)
    title, body = _take_title(body)
    body, headings = _numbered(name, body)
    texts = {cell.metadata["anchor"]: _output_text(cell) for cell in notebook.cells if cell.cell_type == "code"}
    failed = (cell.metadata["anchor"] for cell in notebook.cells if _has_error(cell))
    return Fragment(title or name, body, headings, texts, next(failed, ""))


def _prepared(cell: Any, scrub: Callable[[str], str]) -> Any:
    """The cell without machine paths, its stream outputs joined, outputs dropped where a tag asks for it."""
    cell.source = scrub(cell.source)
    if cell.cell_type != "code":
        return cell
    if "remove-output" in cell.metadata.get("tags", []):
        cell.outputs = []
    for output in cell.outputs:
        if output.output_type == "stream":
            output.text = scrub(output.text)
        elif output.output_type == "error":
            output.traceback = [scrub(line) for line in output.traceback]
            output.evalue = scrub(output.evalue)
        else:
            for kind, value in output.data.items():
                if kind.startswith("text/") and isinstance(value, str):
                    output.data[kind] = safe.outside_pictures(scrub, value)
    joined, _ = CoalesceStreamsPreprocessor().preprocess_cell(cell, {}, 0)  # type: ignore[no-untyped-call]
    return joined


@cache
def _exporter() -> HTMLExporter:
    template = files(__package__).joinpath("templates/cells.html.j2").read_text(encoding="utf-8")
    # Interactive kinds (widgets, scripts) are not listed: what a page can show without running anything is.
    kinds = ["text/html", "text/markdown", "image/png", "image/jpeg", "text/plain"]
    exporter = HTMLExporter(config=Config({"NbConvertBase": {"display_data_priority": kinds}}), raw_template=template)  # type: ignore[no-untyped-call]
    exporter.register_filter("safe_html", safe.clean)  # type: ignore[no-untyped-call]
    return exporter


def _take_title(body: str) -> tuple[str, str]:
    """The first heading, if it is of level 1, and the rest."""
    found = _HEADING.search(body)
    if found is None or found.group(1) != "1":
        return "", body
    return unescape(_MARKUP.sub("", found.group(2))).strip(), body[: found.start()] + body[found.end() :]


def _numbered(name: str, body: str) -> tuple[str, tuple[Heading, ...]]:
    """Headings moved under the section's own, never skipping a level, each with an id and a link to itself."""
    used: dict[str, int] = {}
    headings: list[Heading] = []
    last = TOP - 1

    def replace(found: re.Match[str]) -> str:
        nonlocal last
        level = min(max(int(found.group(1)) + 1, TOP), last + 1, 6)
        last = level
        text = unescape(_MARKUP.sub("", found.group(2))).strip()
        slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:50] or "part"
        used[slug] = used.get(slug, 0) + 1
        anchor = f"{name}--{slug}" + (f"-{used[slug]}" if used[slug] > 1 else "")
        headings.append(Heading(anchor, text, level))
        return f'<h{level} id="{anchor}">{found.group(2)}{PERMALINK.format(anchor)}</h{level}>'

    return _HEADING.sub(replace, body), tuple(headings)


PERMALINK = '<a class="permalink" href="#{0}" aria-label="Link to this part">#</a>'


def _has_error(cell: Any) -> bool:
    return any(output.output_type == "error" for output in cell.get("outputs", []))


def _output_text(cell: Any) -> str:
    """What a cell's outputs say, markup taken out."""
    texts = []
    for output in cell.outputs:
        data = output.get("data", {})
        texts.append(str(output.get("text", "")) or str(data.get("text/html", "")) or str(data.get("text/plain", "")))
    return " ".join(unescape(_MARKUP.sub(" ", safe.outside_pictures(lambda text: text, " ".join(texts)))).split())
