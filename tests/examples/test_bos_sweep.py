"""The sweep of examples/: the data behind its page, and the page."""

import json

import pytest

import bos_sweep
from helpers import zoo

EXACT = 1e-6  # relative; a product in fp32
ROWS = [{"instruction": f"Say sky {n} times.", "output": "sky " * n} for n in range(1, 9)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    base = zoo.phi3(folder / "phi3")
    (folder / "data.json").write_text(json.dumps(ROWS))
    arguments = [
        str(base),
        str(folder / "data.json"),
        "--out",
        str(folder / "out"),
        "--steps",
        "2",
        "--batch-size",
        "2",
    ]
    assert bos_sweep.main([*arguments, "--scales", "1", "0.2", "0", "--texts", "4"]) == 0
    return folder / "out"


def test_the_norm_before_layer_1_is_the_scale_and_the_rest_is_equal(found):
    runs = json.loads((found / "sweep.json").read_text())["runs"]
    plain = runs["1"]["norms"]["layers"][0]["residual_in"]
    for name, run in runs.items():
        stream = run["norms"]["layers"][0]["residual_in"]
        assert stream["first_norm"] == pytest.approx(float(name) * plain["first_norm"], rel=EXACT)
        assert stream["rest_norm"] == plain["rest_norm"]
        losses = [row["loss"] for row in run["log"] if "loss" in row]
        assert len(losses) == 2
        assert None not in losses
    assert runs["1"]["log"][0]["loss"] != runs["0"]["log"][0]["loss"]  # the scale is felt


def test_the_page_shows_a_line_per_scale_in_every_chart(found):
    page = (found / "report.html").read_text(encoding="utf-8")
    text = page.partition('id="chart-data">')[2].partition("</script>")[0]
    charts = {chart["key"]: chart for chart in json.loads(text)["charts"]}
    assert charts.keys() == {"loss", "grad_norm", "before", "after", "first", "attention"}
    for chart in charts.values():
        assert [line["name"] for line in chart["lines"]] == ["scale 1", "scale 0.2", "scale 0"]
    assert charts["before"]["x"] == "position"
    assert charts["before"]["lines"][2]["y"][0] == 0
    assert charts["before"]["lines"][0]["y"][1:] == charts["before"]["lines"][2]["y"][1:]
    assert 'src="' not in page
    assert 'href="http' not in page  # nothing is fetched


def test_a_wrong_model_is_one_line(tmp_path, capsys):
    assert bos_sweep.main([str(tmp_path / "none"), "none.json", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
