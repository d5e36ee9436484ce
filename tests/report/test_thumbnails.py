"""Pictures of samples: small, few, and what the data hold; on the page, in data.json and on a terminal with colours."""

import base64
import io
import json
import re

import pytest
import rich.console
from PIL import Image

from helpers.faults import raises_fault
from helpers.prepared import prepared
from helpers.run_folders import log_rows, write_run
from helpers.seeing import picture, seeing
from surefoot.models.load import load_tokenizer
from surefoot.report.console import as_plain_text
from surefoot.report.data_audit import audit_to_json
from surefoot.report.html import write_report
from surefoot.report.tables.audit import audit_report, audit_views
from surefoot.report.thumbnails import MOST, SIDE, Blocks, from_json, to_json

LARGEST = 1 << 14  # bytes of base64 of a picture of one colour


@pytest.fixture
def data(tmp_path):
    tokenizer = load_tokenizer(seeing("qwen2_5_vl", tmp_path / "base"))
    picture(tmp_path / "sea.png", "blue", (300, 200))
    picture(tmp_path / "rose.png", "red")
    asked = "<image>" * 6 + "?"
    rows = [{"prompt": asked, "chosen": "a", "rejected": "b", "images": ["sea.png", *["rose.png"] * 5]}]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return prepared(tmp_path / "d.jsonl", tokenizer, tmp_path / "cache", kind="pairs")


def test_data_json_holds_the_pictures_of_the_samples_made_small(data, tmp_path):
    found = audit_to_json(data)["train"]
    better, worse = found["samples"]
    assert [one["name"] for one in better["pictures"]] == ["sea.png", *["rose.png"] * (MOST - 1)]
    assert "pictures" not in worse
    assert all("pictures" not in sample for sample in found["sources"][0]["samples"])
    image = Image.open(io.BytesIO(base64.b64decode(better["pictures"][0]["jpeg"])))
    assert max(image.size) == SIDE
    red, green, blue = image.convert("RGB").getpixel((5, 5))
    assert blue > 240 > 10 > max(red, green)
    assert str(tmp_path) not in json.dumps(found["samples"])
    assert all(len(one["jpeg"]) < LARGEST for one in better["pictures"])


def test_the_page_shows_them(data, tmp_path):
    (view,) = audit_views(audit_to_json(data))
    assert [said.split(":")[0] for said, _ in view.examples[0].pictures] == ["sea.png", *["rose.png"] * (MOST - 1)]
    assert view.examples[1].pictures == ()
    run = write_run(tmp_path / "run", log_rows(6), finished=True)
    (run / "data.json").write_text(json.dumps(audit_to_json(data)))
    page = write_report(run).read_text(encoding="utf-8")
    shown = re.findall(r'<img alt="([^"]*)" title="[^"]*" src="data:image/jpeg;base64,[\w+/=]+">', page)
    assert len(shown) == MOST
    assert "300 x 200" in shown[0]


@pytest.mark.parametrize("jpeg", ['"><script>', "data:text/html,x", "A" * (1 << 17), ""])
def test_what_is_no_picture_is_not_shown(data, jpeg):
    written = audit_to_json(data)["train"]["samples"][0]["pictures"][0]
    assert from_json(written)[1] == written["jpeg"]
    assert from_json(written | {"jpeg": jpeg})[1] == ""


def test_a_terminal_with_colours_gets_blocks(data):
    shown = data.audit.samples[0].pictures[0]
    out = io.StringIO()
    rich.console.Console(file=out, force_terminal=True, color_system="truecolor").print(Blocks(shown, indent=4))
    rows = out.getvalue().splitlines()
    assert len(rows) == 8  # 24 x 16 pixels, two in a place
    assert "38;2;0;0;25" in rows[0]
    assert all(row.count("▀") == 24 for row in rows)
    assert "▀" not in as_plain_text(audit_report(data))


def test_a_picture_that_has_changed_is_refused(data, tmp_path):
    picture(tmp_path / "sea.png", "green", (300, 200))
    with raises_fault("SF-DATA-PICTURE", tmp_path / "sea.png"):
        to_json(data.audit.samples[0].pictures[0])
