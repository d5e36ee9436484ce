"""The board in a real browser: it lists, it lives, it goes on after a pause, and it lets in only who has the key."""

import pytest

from helpers.board_server import serving
from helpers.run_folders import NASTY, log_more, log_rows, train_row, write_run
from helpers.tiers import diagonal
from surefoot.system import folder_lock

PATIENCE = 30_000  # milliseconds until a page that should change counts as broken: long, for a busy machine
SIZES = {"desktop": (1440, 900), "phone": (390, 844)}


@pytest.fixture
def root(tmp_path):
    write_run(tmp_path / "runs" / "ended", log_rows(60), finished=True)
    write_run(tmp_path / "runs" / "broken", log_rows(30, 90, bad=(29, 30)), diverged=NASTY)
    write_run(tmp_path / "runs" / "going", log_rows(280, 900))
    return tmp_path / "runs"


@pytest.fixture
def board(root):
    with serving(root) as server:
        yield server


def home(board):
    return f"http://127.0.0.1:{board.server_port}/"


@pytest.mark.parametrize(("size", "scheme"), diagonal(SIZES, ["light", "dark"]))
def test_overview_and_run_at_any_width(board, open_page, size, scheme):
    width, height = SIZES[size]
    watched = open_page(board.address, viewport={"width": width, "height": height}, color_scheme=scheme)
    page = watched.page
    assert page.url == home(board)  # the key is not left in the address
    assert page.locator(".runs tbody tr").count() == 3
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.get_by_role("link", name="broken").click()
    page.wait_for_selector("canvas")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator("img").count() == 0
    assert watched.foreign(home(board)) == []
    assert watched.complaints == []


def test_the_overview_follows(board, open_page, root):
    page = open_page(board.address).page
    row = page.get_by_role("row", name="going")
    assert "Stopped" in row.inner_text()
    page.get_by_role("link", name="going").focus()
    with folder_lock.locked(root / "going"):
        row.get_by_text("Running").wait_for(timeout=PATIENCE)
        log_more(root / "going", [train_row(281, 900, 0.5)])
        row.get_by_text("281 / 900").wait_for(timeout=PATIENCE)
    assert page.evaluate("document.activeElement.textContent") == "going"  # the keyboard's place is not lost
    write_run(root / "new", log_rows(2))
    page.get_by_role("link", name="new").wait_for(timeout=PATIENCE)


def drawn(page):
    """The first curve's pixels, read in one go: a live page replaces its canvases."""
    return page.evaluate("document.querySelector('canvas').toDataURL()")


def wait_for_step(page, step):
    """In the figures, and in the words that describe the curve."""
    page.locator(".figures dd b", has_text=str(step)).first.wait_for(timeout=PATIENCE)
    page.locator(f"[role=img][aria-label*='at step {step}']").first.wait_for(timeout=PATIENCE)


def test_a_run_lives(board, open_page, root):
    watched = open_page(board.address)
    page = watched.page
    page.get_by_role("link", name="going").click()
    page.get_by_text("live", exact=True).wait_for(timeout=PATIENCE)
    before = drawn(page)
    log_more(root / "going", [train_row(step, 900, 6.0) for step in range(281, 300)])
    wait_for_step(page, 299)
    assert drawn(page) != before
    assert watched.complaints == []


@pytest.mark.slow
def test_a_connection_that_was_lost_goes_on(root, open_page):
    """The server ends and another starts in its place."""
    with serving(root) as first:
        page = open_page(first.address).page
        page.get_by_role("link", name="going").click()
        page.get_by_text("live", exact=True).wait_for(timeout=PATIENCE)
        wait_for_step(page, 280)
    page.get_by_text("no connection").wait_for(timeout=PATIENCE)
    log_more(root / "going", [train_row(281, 900, 0.5)])
    with serving(root, first.server_port, token=first.token):
        wait_for_step(page, 281)


def test_without_the_key_there_is_no_page(board, open_page):
    page = open_page(home(board)).page
    assert "Open the address that `surefoot board` printed" in page.content()


def test_a_page_of_another_origin_gets_nothing(board, open_page):
    """With the cookie in the same browser."""
    page = open_page(board.address).context.new_page()
    script = f"fetch('{home(board)}', {{credentials: 'include'}}).then(() => 'read', () => 'refused')"
    html = f"<script>{script}.then((outcome) => {{ document.title = outcome; }})</script>"
    page.route("http://other.example/", lambda route: route.fulfill(body=html, content_type="text/html"))
    page.route(home(board), lambda route: route.continue_())
    page.goto("http://other.example/")
    page.wait_for_function("document.title", timeout=PATIENCE)
    assert page.title() == "refused"
