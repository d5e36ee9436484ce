"""Where a pass is, told as it goes: the module that it is in, and on the way back the one that it has come to."""

import torch
from torch import nn

from surefoot.runs.failures.replay_run import followed


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.second(self.first(x)).tanh()


def test_modules_are_told_in_the_order_of_the_passes():
    model, heard = nn.Sequential(Block(), nn.Linear(2, 1)), []
    x = torch.ones(3, 2)
    with followed(model, lambda word, name: heard.append((word, name)) or 7):
        out = model(x).sum()
        forward = list(heard)
        out.backward()
    assert forward == [
        ("enters", "0"),
        ("enters", "0.first"),
        ("leaves", "0.first"),
        ("enters", "0.second"),
        ("leaves", "0.second"),
        ("leaves", "0"),
        ("enters", "1"),
        ("leaves", "1"),
    ]
    assert heard[len(forward) :] == [("reaches", name) for name in ("1", "0", "0.second", "0.first")]
    gradients = [one.grad.clone() for one in model.parameters()]
    heard.clear()
    model.zero_grad()
    model(x).sum().backward()
    assert heard == []  # twin: nobody is followed outside of the block
    assert all(torch.equal(one.grad, before) for one, before in zip(model.parameters(), gradients, strict=True))
