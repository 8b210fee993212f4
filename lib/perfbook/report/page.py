"""The frame of our pages: style, script and a content security policy that lets nothing else run or load."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined


def fill(template: str, **values: Any) -> str:
    """Fill a template of this package; every value is escaped unless the template marks it safe."""
    script = _text("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = _environment().get_template(template)
    return page.render(css=_text("report.css"), script=script, script_hash=f"sha256-{digest}", **values)


@cache
def _environment() -> Environment:
    return Environment(loader=FunctionLoader(_text), autoescape=True, undefined=StrictUndefined, trim_blocks=True)


def _text(name: str) -> str:
    return files(__package__).joinpath("templates", name).read_text(encoding="utf-8")
