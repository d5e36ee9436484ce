"""report.html in a real browser: drawn, offline, at any width, light, dark and printed; what it quotes does nothing."""

import io
from importlib import resources

import numpy as np
import pytest
from PIL import Image

from helpers.run_folders import NASTY, audit, log_rows, train_row, write_run
from helpers.tiers import diagonal
from surefoot.report.comparison import overlay_page
from surefoot.report.html import write_report
from surefoot.report.views import Table

SIZES = {"desktop": (1440, 900), "phone": (390, 844)}
SCHEMES = ["light", "dark"]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Of a run with gaps, long names, events and samples that are markup."""
    long = "/".join(["a-folder-with-a-long-name"] * 12)
    data = {"train": audit(NASTY), "eval": audit(long)}
    run = write_run(
        tmp_path_factory.mktemp("runs") / "a-run-with-a-name-as-long-as-people-give-them-lr2e-4-dora-r32-seed42",
        log_rows(120, bad=(60, 119)),
        finished=True,
        data=data,
        config=f"output: {NASTY}\nmodel: {long}\n",
    )
    (run / "events.jsonl").open("a").write(f'{{"kind": "best", "step": 40, "time": "now", "text": "{NASTY}"}}\n')
    return write_report(run)


def colours(page, selector="canvas"):
    """How many different colours a screenshot of the element has."""
    picture = Image.open(io.BytesIO(page.locator(selector).first.screenshot())).convert("RGB")
    return len(np.unique(np.asarray(picture).reshape(-1, 3), axis=0))


def background(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def legends(page):
    return [row.inner_text().split() for row in page.locator(".u-legend").all()]


def test_the_legend_shows_the_last_values_until_a_step_is_pointed_at(open_page, tmp_path):
    run = write_run(tmp_path / "run", log_rows(30, evaluate=7), finished=True)
    page = open_page(write_report(run), offline=True).page
    last = f"{0.2 + 4.0 / 30:.4g}", f"{0.3 + 4.0 / 28:.4g}"
    assert "30" in legends(page)[0][0]
    assert all(any(value in word for word in legends(page)[0]) for value in last)
    page.locator(".u-over").first.hover(position={"x": 40, "y": 40})
    assert not any(last[0] in word for word in legends(page)[0])  # the twin: the values of another step
    assert not any("–" in word for row in legends(page)[1:] for word in row[:1])


def test_a_chart_of_one_point_ends_with_it(open_page, tmp_path):
    run = write_run(tmp_path / "run", log_rows(30, evaluate=30), finished=True)
    page = open_page(write_report(run), offline=True).page
    assert place_of_point(page.locator("figure").nth(1)) > 0.95


def test_twin_by_the_range_that_uplot_takes_it_would_not(open_page, tmp_path):
    run = write_run(tmp_path / "run", log_rows(30, evaluate=30), finished=True)
    path = write_report(run)
    path.write_text(path.read_text().replace(", range: ends }", " }"))
    assert 0.2 < place_of_point(open_page(path, offline=True, bypass_csp=True).page.locator("figure").nth(1)) < 0.8


def place_of_point(figure):
    """Of the only mark of an evaluation, as a share of the width: by its colour."""
    picture = Image.open(io.BytesIO(figure.locator(".u-over").screenshot())).convert("RGB")
    red, green, blue = np.moveaxis(np.asarray(picture).astype(int), -1, 0)
    columns = np.flatnonzero(((red - blue > 100) & (red - green > 40)).any(axis=0))
    return columns.mean() / picture.width


@pytest.mark.parametrize(("size", "scheme"), diagonal(SIZES, SCHEMES))
def test_it_is_drawn_at_any_width_and_fetches_nothing(report, open_page, size, scheme):
    width, height = SIZES[size]
    watched = open_page(report, viewport={"width": width, "height": height}, color_scheme=scheme, offline=True)
    page = watched.page
    assert page.locator("canvas").count() == 5
    assert page.locator("#still").inner_text()  # names the sixth, which never changes
    assert colours(page) > 20
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert watched.asked == [report.as_uri()]
    assert watched.complaints == []
    assert background(page) == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 22, 28)"}[scheme]


def test_twin_a_canvas_that_nothing_draws_on_is_noticed(report, open_page, tmp_path):
    text = report.read_text(encoding="utf-8")
    blank = tmp_path / "blank.html"
    blank.write_text(text.replace("<main>", '<main><canvas width="300" height="100"></canvas>', 1), encoding="utf-8")
    assert colours(open_page(blank).page) < 20


def test_twin_a_request_is_noticed(report, open_page, tmp_path):
    """And the policy of the page forbids it before it leaves."""
    page = tmp_path / "page.html"
    text = report.read_text(encoding="utf-8")
    page.write_text(text.replace("<main>", '<main><img src="http://example.org/x.png">', 1), encoding="utf-8")
    assert any("Content Security Policy" in complaint for complaint in open_page(page).complaints)


def test_what_is_quoted_does_nothing(report, open_page):
    watched = open_page(report)
    dialogs = []
    watched.page.on("dialog", lambda dialog: dialogs.append(dialog.message) or dialog.dismiss())
    watched.page.reload()
    assert watched.page.locator("img").count() == 0
    assert watched.page.get_by_text(NASTY).count() >= 2
    assert dialogs == watched.complaints == []


def test_a_script_that_got_in_would_not_run(report, open_page, tmp_path):
    page = tmp_path / "page.html"
    text = report.read_text(encoding="utf-8")
    page.write_text(text.replace("<main>", "<main><script>document.title = 'taken'</script>", 1), encoding="utf-8")
    watched = open_page(page)
    assert watched.page.title() != "taken"


def test_dark_and_light_can_change_while_it_is_open(report, open_page):
    page = open_page(report, color_scheme="light").page
    before = page.locator("canvas").first.screenshot()
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(100)
    assert page.locator("canvas").first.screenshot() != before


def test_in_print_it_is_dark_on_white(report, open_page):
    page = open_page(report, color_scheme="dark").page
    page.emulate_media(media="print")
    assert background(page) == "rgb(255, 255, 255)"
    assert not page.locator("nav").is_visible()


def test_without_scripts_there_is_a_table(report, open_page):
    page = open_page(report, java_script_enabled=False).page
    assert page.locator("noscript table").first.is_visible()
    assert "not finite" in page.locator("noscript table").first.inner_text()


def test_the_keyboard_reaches_the_sections_and_curves_have_words(report, open_page):
    page = open_page(report).page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.hash") == "#curves"
    page.keyboard.press("Enter")
    label = page.get_by_role("img").first.get_attribute("aria-label")
    assert label.startswith("Loss (nats per token) by optimizer step. training: 4.2 at step 1")
    assert "2 not finite" in label


def test_a_width_that_changes_is_followed(report, open_page):
    page = open_page(report).page
    page.set_viewport_size({"width": 700, "height": 900})
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") == 700
    assert page.locator("canvas").first.bounding_box()["width"] < 700


def test_twenty_thousand_points(open_page, tmp_path):
    run = write_run(tmp_path / "run", [train_row(step, 20_000, 1.0 + 1.0 / step) for step in range(1, 20_001)])
    watched = open_page(write_report(run), offline=True)
    assert colours(watched.page) > 20
    assert watched.complaints == []


def test_a_run_without_a_step(open_page, tmp_path):
    watched = open_page(write_report(write_run(tmp_path / "run")))
    assert watched.page.locator("canvas").count() == 0
    assert watched.complaints == []


def ticks(page, script: str, step: float) -> list[str]:
    """Four ticks of an axis, in the words of the page's own script."""
    functions = script[script.index("function tick(") : script.index("function series(")]
    return page.evaluate(f"() => {{ {functions} return [0, 1, 2, 3].map((k) => tick(k * {step}, {step})); }}")


def test_ticks_are_the_values_that_they_stand_at(report, open_page):
    page = open_page(report).page
    script = (resources.files("surefoot.report") / "assets" / "page.js").read_text(encoding="utf-8")
    assert ticks(page, script, 2.5) == ["0", "2.5", "5.0", "7.5"]
    assert ticks(page, script, 0.25) == ["0", "0.25", "0.50", "0.75"]
    assert ticks(page, script, 0.1) == ["0", "0.1", "0.2", "0.3"]
    assert ticks(page, script, 500) == ["0", "500", "1,000", "1,500"]
    fewer = script.replace("digits(step));", "Math.max(0, -Math.floor(Math.log10(step))));")
    assert ticks(page, fewer, 2.5) == ["0", "3", "5", "8"]  # twin


SEEN = """(name) => {
  const one = document.createElement("p");
  one.style.color = `var(--${name})`;
  document.body.append(one);
  return getComputedStyle(one).color;
}"""


def test_the_mark_of_the_best_has_one_colour(report, open_page):
    page = open_page(report).page
    key = page.locator(".keys .best").first
    assert key.inner_text() == "◆"
    of_key = page.evaluate("getComputedStyle(document.querySelector('.keys .best')).color")
    of_mark, soft = (page.evaluate(SEEN, name) for name in ("eval", "soft"))
    assert of_key == of_mark != soft


def test_a_comparison_shows_every_column_on_a_phone(open_page, tmp_path):
    columns = ("scale", "first loss", "last loss", "gradient norm, mean", "largest norm", "norm of first", "the rest")
    table = Table(columns, (("0.1", *["0.123456789"] * 6),), numeric=True)  # beside each other too wide in any font
    path = tmp_path / "page.html"
    path.write_text(overlay_page("scales", "", [], [("By scale", table)]), encoding="utf-8")

    def beyond_the_edge(page) -> int:
        cells = "[...document.querySelectorAll('td')].filter((cell) => cell.getBoundingClientRect().right > innerWidth)"
        return page.evaluate(f"{cells}.length")

    assert beyond_the_edge(open_page(path, viewport={"width": 390, "height": 844}).page) == 0
    path.write_text(path.read_text(encoding="utf-8").replace("cards", "rows"), encoding="utf-8")
    assert beyond_the_edge(open_page(path, viewport={"width": 390, "height": 844}).page) >= 1  # twin
