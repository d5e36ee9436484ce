"""Self-contained pages: templates filled with escaped values, style and script inside, nothing fetched.

Every value that a template prints is escaped, and control characters are shown as escapes: file names, configs and what
a model says may hold anything. The Content-Security-Policy names the hash of each inline style and script, so that
nothing else runs even if an escape were missing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import unicodedata
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

_ASSETS = resources.files("surefoot.report") / "assets"
_STYLES = ("uPlot.min.css", "page.css")
_SCRIPTS = ("uPlot.iife.min.js", "page.js")
_IN_SCRIPT = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def render(template: str, values: Mapping[str, Any], connect: str = "'none'") -> str:
    """A page. template: a file in `assets`. values: what it prints, unescaped. connect: where its script may fetch."""
    return part(template, {**values, "style": _inline(_STYLES), "script": _inline(_SCRIPTS), "policy": policy(connect)})


def part(template: str, values: Mapping[str, Any]) -> str:
    """A piece of a page, for the live page to put in the place of the one it has."""
    return _templates().get_template(template).render(values)


@cache
def policy(connect: str = "'none'") -> str:
    """The Content-Security-Policy of a page. connect: where its script may fetch from."""
    style, script = (_hash(_inline(names)) for names in (_STYLES, _SCRIPTS))
    return (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; img-src data:; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("surefoot.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["script_json"] = _script_json
    return environment


@cache
def _inline(names: tuple[str, ...]) -> Markup:
    """Files one after the other, exactly as they will stand between the tags: the hash is taken of this."""
    return Markup("\n".join((_ASSETS / name).read_text(encoding="utf-8") for name in names))


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _script_json(value: Any) -> Markup:
    """JSON that no text in it can end early: within <script> only a "<" could."""
    return Markup(json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(_IN_SCRIPT))


def _printable(value: Any) -> Any:
    """Text with control characters as escapes, so that none is obeyed: not an ANSI code, not a change of direction."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return "".join(letter if _is_shown(letter) else letter.encode("unicode_escape").decode() for letter in value)


def _is_shown(letter: str) -> bool:
    """Spaces of all scripts, and the joiners without which some scripts and emoji fall apart, are no control codes."""
    return letter.isprintable() or letter in "\n\t\u200c\u200d" or unicodedata.category(letter) == "Zs"
