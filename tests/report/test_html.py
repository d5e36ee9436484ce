"""The files from elsewhere that lie in the package are those that the note beside them names.

report.html without a browser: it is complete, self-contained, escaped, and written whatever the folder holds.
"""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib import resources
from unittest.mock import Mock

import pytest

from helpers.faults import gives
from helpers.run_folders import NASTY, audit, log_rows, train_row, write_run
from surefoot.report import html
from surefoot.report import html as page
from surefoot.report.html import draw_report, render, write_report
from surefoot.report.wording import number
from surefoot.system.errors import EnvironmentFault, Fault

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


DAMAGE = ["plan.json", "config.yaml", "environment.json", "data.json", "all_results.json"]
LOGS = ["trainer_log.jsonl", "events.jsonl", "samples.jsonl"]


class Elements(HTMLParser):
    """Start tags with their attributes, and the text of each script and style."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict]] = []
        self.inside: list[tuple[str, dict, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.inside.append((tag, dict(attrs), ""))

    def handle_data(self, data):
        if self.cdata_elem in ("script", "style"):
            tag, attrs, text = self.inside[-1]
            self.inside[-1] = (tag, attrs, text + data)


def report(run) -> str:
    return write_report(run).read_text(encoding="utf-8")


@pytest.fixture
def finished(tmp_path):
    return write_run(tmp_path / "run", log_rows(60, bad=(7,)), finished=True)


def test_everything_is_on_the_page(finished):
    text = report(finished)
    for heading in ("Curves", "Events", "Samples", "Data", "Plan", "Results", "Environment", "Config", "Next"):
        assert f">{heading}</h2>" in text
    assert 'class="badge finished"' in text
    assert f"surefoot chat {finished}" in text
    assert html.read_run(finished).plan.compile.reason in text
    assert "<noscript>" in text
    assert number(None) in text  # the loss of step 7


def check_nothing_is_fetched(text):
    for tag, attributes in Elements(text).tags:
        for name in ("src", "href", "action", "data", "srcset", "poster"):
            target = attributes.get(name) or ""
            assert not target or target.startswith(("#", "data:image/svg+xml,")), (tag, name, target)
        assert not any(name.startswith("on") for name in attributes)
        assert "style" not in attributes
    assert "@import" not in text
    assert "url(" not in text


def test_nothing_is_fetched(finished):
    check_nothing_is_fetched(report(finished))


def test_twin_a_picture_from_elsewhere_is_noticed(finished):
    with pytest.raises(AssertionError):
        check_nothing_is_fetched(report(finished).replace("<main>", '<main><img src="http://example.org/x.png">'))


def check_it_is_escaped(run):
    text = report(run)
    elements = Elements(text)
    assert "img" not in [tag for tag, _ in elements.tags]
    assert "onerror=alert" in text  # it is there, as text
    assert len(elements.inside) == 3  # style, data, script


@pytest.fixture
def nasty(tmp_path):
    """The same markup as a folder's name, a file's name, a config value, an event and what a model says."""
    name = NASTY.replace("/", "⁄")
    run = write_run(
        tmp_path / name, log_rows(12), data={"train": audit(NASTY), "eval": None}, config=f"output: {NASTY}\n"
    )
    (run / "events.jsonl").write_text('{"kind": "<i onx=1>", "step": 3, "time": "<b>", "text": "</script><img>"}\n')
    return run


def test_markup_in_names_configs_and_answers_is_text(nasty):
    check_it_is_escaped(nasty)


def test_twin_without_escaping_it_would_be_markup(nasty, monkeypatch):
    page._templates.cache_clear()
    environment = page._templates()
    environment.autoescape = False
    try:
        with pytest.raises(AssertionError):
            check_it_is_escaped(nasty)
    finally:
        page._templates.cache_clear()


def test_no_text_ends_the_data_in_the_script():
    assert "</script><img" in json.dumps(NASTY)  # the twin: as JSON alone would have it
    shown = page._templates().from_string("{{ text | tojson }}").render(text=NASTY)
    assert "<" not in shown
    assert json.loads(shown) == NASTY


def test_control_characters_are_shown_and_not_obeyed(tmp_path):
    run = write_run(tmp_path / "run", log_rows(3), config="name: \x1b[31m\u202e\u2066\x00 日本\u3000語 👩\u200d🚀\n")
    text = report(run)
    assert "\\x1b[31m\\u202e\\u2066\\x00 日本\u3000語 👩\u200d🚀" in text


def test_the_policy_names_what_is_inside(finished):
    elements = Elements(report(finished))
    policy = next(attrs["content"] for tag, attrs in elements.tags if attrs.get("http-equiv"))
    hashes = {
        kind: f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for kind, attrs, text in elements.inside
        if "type" not in attrs
    }
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'none'"
    assert rules["script-src"] == hashes["script"]
    assert rules["style-src"] == hashes["style"]


def test_twenty_thousand_points_stay_below_a_megabyte(tmp_path):
    run = write_run(tmp_path / "run", [train_row(step, 20_000, 1.0 + 1.0 / step) for step in range(1, 20_001)])
    assert write_report(run).stat().st_size < 10**6


@pytest.mark.parametrize("status", ["stopped", "diverged"])
def test_a_run_that_did_not_finish_says_how_to_go_on(tmp_path, status):
    said = "step 9: the loss was not finite, 3 times in a row" if status == "diverged" else ""
    text = report(write_run(tmp_path / "run", log_rows(9, 30, bad=(8, 9)), diverged=said))
    assert f'class="badge {status}"' in text
    assert "surefoot train" in text
    assert ("--resume" in text) == (status == "stopped")  # a diverged run would come to the same numbers again
    assert said.replace("step 9", "Step 9") in text


@pytest.mark.parametrize("name", [*DAMAGE, *LOGS])
@pytest.mark.parametrize("damage", ["absent", "half", "binary", "other", "link"])
def test_whatever_is_damaged_the_rest_is_shown(finished, name, damage):
    path = finished / name
    content = path.read_bytes()
    path.unlink()
    if damage == "half":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "binary":
        path.write_bytes(b"\x00\xff\xfe" * 50 + b"\n")
    elif damage == "other":
        path.write_text('{"train": [1], "plan": 3, "step": "x", "device": 7, "versions": [2]}\n')
    elif damage == "link":
        path.symlink_to("/etc/passwd")
    text = report(finished)
    assert "root:" not in text
    assert ">Next</h2>" in text
    if damage == "binary" and name != "config.yaml":
        assert name in re.search(r'<ul class="cautions".*?</ul>', text)[0]


def test_an_empty_folder_has_a_report_too(tmp_path):
    text = report(tmp_path)
    assert 'id="h-curves"' in text
    assert '"charts":[]' in text


def test_rows_that_go_back_or_have_no_step_are_left_out(tmp_path):
    rows = [*log_rows(5), {"loss": 3.0}, {"current_steps": "6", "loss": 1.0}, train_row(2, 5, 9.0)]
    run = write_run(tmp_path / "run", rows)
    assert [row["current_steps"] for row in html.read_run(run).rows] == [1, 2, 3, 4, 5]


def test_a_report_that_cannot_be_made_is_a_caution(finished, monkeypatch):
    assert draw_report(finished) == (["report.html"], [])
    monkeypatch.setattr(html, "read_run", lambda run: 1 / 0)
    names, cautions = draw_report(finished)
    assert names == []
    (caution,) = cautions
    assert all(gives(caution, one) for one in ("report.html", "ZeroDivisionError"))


def test_a_disk_that_takes_no_report_is_named_once(finished, monkeypatch):
    fault = EnvironmentFault(Fault(str(finished / "report.html"), "cannot be written", code="SF-DISK-FULL"))
    monkeypatch.setattr(html, "write_report", Mock(side_effect=fault))
    (caution,) = draw_report(finished)[1]
    assert caution.count("report.html") == 1
    assert not gives(caution, "EnvironmentFault")


def test_a_template_that_lacks_a_value_is_an_error():
    with pytest.raises(Exception, match="undefined"):
        render("report.html", {})
