"""Pictures: what is in them, that equal runs give equal files, and that a failure ends nothing."""

import contextlib
import signal

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from helpers.faults import gives
from surefoot.report.pictures import plots
from surefoot.report.pictures.plots import EVAL_LOSS, QUANTITIES, SMOOTH_FROM, curve_of, draw, draw_curves, png, smooth

pytestmark = pytest.mark.pictures
LOSS = QUANTITIES[0]


def make_rows(steps, skipped=()):
    rows = []
    for step in range(1, steps + 1):
        row = {"current_steps": step, "loss": None if step in skipped else 1.0 + 2.0 / step}
        if step in skipped:
            row["skipped"] = "non_finite"
        rows.append(row)
        if step % 5 == 0:
            rows.append({"current_steps": step, "eval_loss": 1.1 + 2.0 / step, "eval_accuracy": 0.5 + step / 1000})
    return rows


def test_one_file_for_each_quantity_that_has_a_curve(tmp_path):
    written, cautions = draw_curves(tmp_path, make_rows(20), "demo")
    names = {"training_loss.png", "training_eval_loss.png", "training_eval_accuracy.png"}
    assert set(written) == {path.name for path in tmp_path.iterdir()} == names
    assert cautions == []
    with Image.open(tmp_path / "training_loss.png") as picture:
        assert picture.size == (960, 540)
        assert len(np.unique(np.asarray(picture.convert("L")))) > 20


def test_a_run_on_rewards_has_their_curve_and_none_of_their_negative(tmp_path):
    rows = [{"current_steps": step, "loss": 0.0, "response_tokens": 9, "reward": step / 9} for step in range(1, 7)]
    of_step_6 = {"current_steps": 6, "eval_loss": -0.5, "eval_response_tokens": 9, "eval_reward": 0.5}
    written, _ = draw_curves(tmp_path, [{**of_step_6, "current_steps": 0}, *rows, of_step_6], "demo")
    assert set(written) == {"training_loss.png", "training_reward.png", "training_eval_reward.png"}
    figure = draw(curve_of(rows, plots.REWARD), plots.REWARD, "demo", curve_of([of_step_6], plots.EVAL_REWARD))
    drawn = [line.get_xydata().tolist() for line in figure.axes[0].lines]
    assert [[step, step / 9] for step in range(1, 7)] in drawn
    assert [[6, 0.5]] in drawn


def test_a_single_point_is_no_curve(tmp_path):
    assert draw_curves(tmp_path, make_rows(1), "demo") == ([], [])


def test_gaps_and_units():
    curve = curve_of(make_rows(6, skipped=(3, 4)), LOSS)
    assert curve.steps == (1, 2, 5, 6)
    assert curve.gaps == (3, 4)
    accuracy = curve_of(make_rows(5), QUANTITIES[2])
    assert accuracy.values == pytest.approx((50.5,))


def test_a_scaler_skip_keeps_its_point_and_is_marked():
    rows = [{"current_steps": 1, "loss": 2.0, "skipped": "scaler"}, {"current_steps": 2, "loss": 1.0}]
    assert curve_of(rows, LOSS) == plots.Curve((1, 2), (2.0, 1.0), (1,))


def by_the_formula(values):
    """Every value weighted by its distance, in numpy."""
    side = max(len(values) / 50, 1)
    weight = min(side / (1 + side), 0.9)
    places = np.arange(len(values))
    kernel = weight ** np.abs(places[:, None] - places[None, :])
    return list(kernel @ np.array(values) / kernel.sum(axis=1))


@pytest.mark.parametrize("count", [1, 3, 40, 1000])
def test_smoothing_against_the_formula(count):
    values = list(np.random.default_rng(count).normal(size=count))
    assert smooth(values) == pytest.approx(by_the_formula(values), abs=1e-12)
    assert smooth([]) == []


def moving_average(values):
    """Of what came before alone, begun with the first value."""
    smoothed = list(values[:1])
    for value in values[1:]:
        smoothed.append(0.8 * smoothed[-1] + 0.2 * value)
    return smoothed


def check_no_lag(smoothing):
    falling = [3.0 - 0.02 * step for step in range(100)]
    middle = slice(30, 70)
    assert smoothing(falling)[middle] == pytest.approx(falling[middle], abs=1e-3)
    jump = [4.0] + [0.5] * 39  # a loss that the first steps bring down: the first value is no past of the others
    assert smoothing(jump)[4] < 0.6


def test_the_smoothed_line_does_not_lag():
    check_no_lag(smooth)


def test_twin_a_moving_average_lags():
    with pytest.raises(AssertionError):
        check_no_lag(moving_average)


def test_a_short_curve_is_shown_as_it_is():
    for count, smoothed in ((SMOOTH_FROM - 1, False), (SMOOTH_FROM, True)):
        (axes,) = draw(curve_of(make_rows(count), LOSS), LOSS, "short").figure.axes
        assert ("smoothed" in [line.get_label() for line in axes.lines]) is smoothed


def test_an_evaluation_is_no_batch_and_is_smoothed_later():
    (axes,) = draw(curve_of(make_rows(SMOOTH_FROM), LOSS), EVAL_LOSS, "few").figure.axes
    assert [line.get_label() for line in axes.lines] == ["measured"]


def test_a_short_curve_is_smoothed_visibly():
    """LLaMA-Factory's picture, which people know, has both lines at any length."""
    saw = [0.0, 1.0] * 6
    inner = smooth(saw)[2:-2]
    assert max(inner) - min(inner) < 0.5


def test_the_picture_says_what_it_shows():
    rows = make_rows(40, skipped=(7,))
    figure = draw(curve_of(rows, LOSS), LOSS, "llama3-dora", curve_of(rows, EVAL_LOSS))
    (axes,) = figure.axes
    assert gives(axes.get_title(loc="left"), "llama3-dora")
    assert gives(axes.get_xlabel(), "step")
    assert all(gives(axes.get_ylabel(), word) for word in ("loss", "nats", "token"))
    *labels, skipped = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["measured", "smoothed", "evaluation"]
    drawn = {line.get_label(): line.get_xdata() for line in axes.lines}
    assert list(drawn[skipped]) == [7]


def test_equal_rows_equal_bytes():
    rows = make_rows(12)
    assert png(draw(curve_of(rows, LOSS), LOSS, "a")) == png(draw(curve_of(rows, LOSS), LOSS, "a"))
    assert png(draw(curve_of(rows, LOSS), LOSS, "a")) != png(draw(curve_of(make_rows(13), LOSS), LOSS, "a"))


def test_a_failure_is_a_caution(tmp_path, monkeypatch):
    def fail(figure):
        raise RuntimeError("font")

    monkeypatch.setattr(plots, "png", fail)
    written, cautions = draw_curves(tmp_path, make_rows(20), "demo")
    assert written == []
    assert all(gives(cautions[0], one) for one in ("training_loss.png", "RuntimeError", "font"))
    assert list(tmp_path.iterdir()) == []


def interrupted(monkeypatch, number):
    """The next picture gets a signal in a call whose binding loses the exception, as pybind11's casters do."""

    def lose(figure):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(number)
        return b"picture"

    monkeypatch.setattr(plots, "png", lose)


@pytest.fixture
def raised_on_sigterm():
    def interrupt(number, frame):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    yield
    signal.signal(signal.SIGTERM, previous)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_picture_is_drawn_is_not_lost(tmp_path, monkeypatch, raised_on_sigterm, number):
    interrupted(monkeypatch, number)
    with pytest.raises(KeyboardInterrupt):
        draw_curves(tmp_path, make_rows(20), "demo")


def test_twin_without_holding_it_the_signal_is_lost(tmp_path, monkeypatch, raised_on_sigterm):
    interrupted(monkeypatch, signal.SIGTERM)
    monkeypatch.setattr(plots, "held_interruptions", contextlib.nullcontext)
    assert draw_curves(tmp_path, make_rows(20), "demo")[0]


@pytest.mark.parametrize("held", [True, False])
def test_a_signal_while_a_picture_is_rendered_is_not_lost(monkeypatch, raised_on_sigterm, held):
    render = FigureCanvasAgg.print_png

    def interrupted_render(canvas, *words, **keys):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        render(canvas, *words, **keys)

    monkeypatch.setattr(FigureCanvasAgg, "print_png", interrupted_render)
    if not held:  # twin
        monkeypatch.setattr(plots, "held_interruptions", contextlib.nullcontext)
    with pytest.raises(KeyboardInterrupt) if held else contextlib.nullcontext():
        png(Figure())
