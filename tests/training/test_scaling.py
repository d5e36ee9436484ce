"""The loss scale follows torch's GradScaler step by step."""

import torch

from surefoot.training import state as scaling
from surefoot.training.state import LossScale


def torch_trajectory(overflows: list[bool], interval: int) -> list[float]:
    """The scale that torch.amp.GradScaler uses at each step, driven with gradients that overflow where told."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", growth_interval=interval)
    scales = []
    for overflow in overflows:
        scales.append(scaler.get_scale())
        scaler.scale(parameter.sum()).backward()
        if overflow:
            parameter.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scales


def our_trajectory(overflows: list[bool]) -> list[float]:
    scale, scales = LossScale(), []
    for overflow in overflows:
        scales.append(scale.scale)
        scale = scale.after_overflow() if overflow else scale.after_step()
    return scales


PATTERN = [False] * 9 + [True] * 3 + [False] * 4 + [True] + [False] * 12


def test_same_scale_as_torch(monkeypatch):
    monkeypatch.setattr(scaling, "GROWTH_INTERVAL", 4)
    assert our_trajectory(PATTERN) == torch_trajectory(PATTERN, interval=4)


def test_twin_another_interval_is_noticed(monkeypatch):
    monkeypatch.setattr(scaling, "GROWTH_INTERVAL", 5)
    assert our_trajectory(PATTERN) != torch_trajectory(PATTERN, interval=4)


def test_the_scale_stops_at_its_floor():
    scale = LossScale(2.0)
    assert scale.can_fall
    scale = scale.after_overflow()
    assert scale == LossScale(1.0)
    assert not scale.can_fall
    assert scale.after_overflow() == LossScale(1.0)
