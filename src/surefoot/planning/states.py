"""Memory of layers that pass on several hidden states of a token (AltUp, Gemma 3n) and keep sparse activations.

A layer predicts all S states as a product, computes with one of them, and corrects all by what it changed. With h
hidden, r bytes of the residual stream and b of the compute dtype it also keeps, per token:

    states               the product's operand b * Sh, the change for each state r * Sh; in fp32, where a norm's input
                         is a view of them, both sets of states whole, 2r * (S - 1)h
    router               its norm runs a second time; the scaled state that the gate of the layer's inputs reads
    sparse MLP           the gate before its smaller half is cut off, b * i
"""

from __future__ import annotations

from surefoot.planning.workload import BYTES, Workload


def states_bytes(work: Workload) -> int:
    """Return the bytes per token and layer that a layer with one state does not keep."""
    model, b = work.model, work.width
    size = int(b * model.sparse * model.intermediate)
    if model.states == 1:
        return size
    trains, whole = work.adapter is None, work.residual == BYTES["fp32"]
    states = model.states * (b + work.residual) + (2 * work.residual * (model.states - 1) if whole else 0)
    router = (8 if trains else 4) + b + (4 if trains else 0)
    return size + model.hidden * (states + router)
