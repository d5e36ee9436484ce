from surefoot.training.report import StepReport
from surefoot.training.state import RunState


def after(*steps):
    state = RunState()
    for number, (loss, weight, decision) in enumerate(steps, 1):
        report = StepReport(number, loss, 1.0, 0.1, weight, weight, (), decision, None, 0.0)
        state = state.after_step(report)
    return state


def test_the_mean_loss_weighs_tokens_and_leaves_out_steps_that_moved_nothing():
    steps = [(4.0, 10, "stepped"), (None, 10, "non_finite"), (9.0, 10, "scaler"), (1.0, 30, "stepped")]
    assert after(*steps).mean_loss == (4.0 * 10 + 1.0 * 30) / 40
    assert after(*steps).mean_loss != (4.0 + 1.0) / 2  # twin: a mean over steps
    assert RunState().mean_loss is None


def test_the_state_survives_json():
    state = after((0.1 + 0.2, 7, "stepped"))
    assert RunState.from_json(state.to_json()) == state
