"""What may stand in a report: no foreign markup, no machine paths.

Outputs of notebooks can hold what a server, a model or a log wrote. They are reduced to an allow-list of tags and
attributes before they come near the page; the page's own content security policy is the second lock.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

from bleach.sanitizer import Cleaner  # type: ignore[import-untyped]

from perfbook import paths
from perfbook.errors import BadInput

# fmt: off
_TAGS = frozenset({
    "a", "abbr", "b", "blockquote", "br", "caption", "code", "col", "colgroup", "dd", "del", "details", "div", "dl",
    "dt", "em", "figcaption", "figure", "h1", "h2", "h3", "h4", "h5", "h6",
    "hr", "i", "img", "kbd", "li", "ol", "p", "pre", "s", "section", "small", "span", "strong", "sub",
    "summary", "sup", "table", "tbody", "td", "tfoot", "th", "thead", "tr", "ul", "var",
})
# fmt: on
_ATTRIBUTES = {
    "*": ["class", "title"],
    "a": ["href"],
    "img": ["alt", "height", "src", "width"],
    "td": ["colspan", "data-value", "rowspan"],
    "th": ["colspan", "data-value", "rowspan", "scope"],
}
_DROPPED = re.compile(r"<(script|style|template)\b.*?</\1\s*>", re.IGNORECASE | re.DOTALL)
_REMOTE_IMAGE = re.compile(r"<img(?![^>]*\ssrc=\"data:image/)[^>]*>")
_DATA = re.compile(r"data:image/(?:png|jpeg|gif|svg\+xml|webp);base64,[A-Za-z0-9+/=\s]+")
_ALT = re.compile(r'\balt="([^"]*)"')


def clean(html: str) -> str:
    """Reduce HTML to the allow-list; pictures only where their data are inside, links only to the web or the page."""
    pictures: list[str] = []

    def keep(match: re.Match[str]) -> str:
        pictures.append("".join(match.group().split()))
        return f"data:image/kept,{len(pictures) - 1}"

    cleaner = Cleaner(
        tags=_TAGS,
        attributes=_ATTRIBUTES,
        protocols=["http", "https", "mailto", "data"],
        strip=True,
        strip_comments=True,
    )
    cleaned: str = cleaner.clean(_DATA.sub(keep, _DROPPED.sub("", html)))
    cleaned = _REMOTE_IMAGE.sub(_named, cleaned)
    cleaned = re.sub(r'href="data:[^"]*"', "", cleaned)
    return re.sub(r"data:image/kept,(\d+)", lambda match: pictures[int(match.group(1))], cleaned)


def outside_pictures(change: Callable[[str], str], html: str) -> str:
    """Apply a change to HTML but not to the pictures in it, whose base64 could hold anything by chance."""
    parts = _DATA.split(html)
    pictures = [found.group() for found in _DATA.finditer(html)]
    return "".join(text for pair in zip(map(change, parts), [*pictures, ""], strict=True) for text in pair)


def _named(image: re.Match[str]) -> str:
    """In place of a picture that the page would have to fetch: what it was."""
    alt = _ALT.search(image.group())
    described = alt.group(1) if alt and alt.group(1) else "no description"
    return f'<span class="missing">[picture not embedded: {described}]</span>'


def scrubber(run: Path) -> Callable[[str], str]:
    """A function that takes this machine's and its users' folders out of a text.

    The checkout and the run become relative, a home becomes ``~``, an environment's packages ``site-packages/``.
    """
    folders = {str(run.parent.parent): "outputs"}
    with contextlib.suppress(BadInput):  # rendered away from a checkout: the patterns below still hold
        folders |= {str(paths.repository()): "", str(paths.outputs()): "outputs"}
    folders.pop("/", None)
    longest_first = sorted(folders, key=len, reverse=True)
    known = re.compile(f"({'|'.join(map(re.escape, longest_first))})(?![\\w.-])(/?)")

    def relative(found: re.Match[str]) -> str:
        name, slash = folders[found.group(1)], found.group(2)
        return name + slash if name else ("" if slash else ".")

    def scrub(text: str) -> str:
        return _HOME.sub("~", known.sub(relative, _PACKAGES.sub("site-packages/", text)))

    return scrub


_PACKAGES = re.compile(r"(?:/[\w.@+-]+)+/(?:site|dist)-packages/")
_HOME = re.compile(r"(?<![\w./-])(?:/home/[\w.-]+|/Users/[\w.-]+|/root|" + re.escape(str(Path.home())) + r")(?![\w.-])")
