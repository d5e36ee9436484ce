"""The files from elsewhere that lie in the package are those that the note beside them names."""

from __future__ import annotations

import hashlib
import re
from importlib import resources

ASSETS = resources.files("surefoot.report") / "assets"


def test_the_vendored_files_are_unchanged():
    said = dict(re.findall(r"^([0-9a-f]{64})  (\S+)$", (ASSETS / "README.md").read_text(), flags=re.MULTILINE))
    found = {path.name: path for path in ASSETS.iterdir() if path.name.startswith("uPlot")}
    assert {name: digest for digest, name in said.items()} == {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()
    }


def test_their_version_is_the_one_that_the_page_names():
    assert "(v1.6.32)" in (ASSETS / "uPlot.iife.min.js").read_text(encoding="utf-8")[:100]
    assert "uPlot 1.6.32" in (ASSETS / "report.html").read_text(encoding="utf-8")
