"""The probes of surefoot's kernels and of packages', which run in a child process (`surefoot.planning.probes.child`).

run_in_child(DocumentsRequest(…), DOCUMENTS)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from surefoot.kernels.packed_attention import FORMS, Attend, documents_of
from surefoot.planning.measurements import AttentionTrial, PointwiseTrial
from surefoot.planning.probes.attention import Form
from surefoot.planning.probes.child import Begin, Probe
from surefoot.planning.probes.documents import DocumentsRequest, OfDocuments, document_trials
from surefoot.planning.probes.pointwise import Function, PointwiseRequest, Ways, pointwise_trials


def _documents(request: DocumentsRequest, begin: Begin) -> tuple[AttentionTrial, ...]:
    device = torch.device(request.device)

    def of_documents(attend: Attend) -> OfDocuments:
        def form(documents: Sequence[int]) -> Form:
            found = documents_of(documents, device)
            return lambda q, k, v: attend(q, k, v, found, request.head_dim**-0.5)

        return form

    return document_trials(request, {name: of_documents(attend) for name, attend in FORMS.items()}, begin=begin)


def _pointwise(request: PointwiseRequest, begin: Begin) -> tuple[PointwiseTrial, ...]:
    return pointwise_trials(request, pointwise_ways(request.device), begin=begin)


def pointwise_ways(device: str = "cpu") -> Ways:
    """RMSNorm as in Llama and Gemma, rotary embedding, and gated activations: reference code and fused. device: cpu |
    cuda."""
    from surefoot.kernels import liger
    from surefoot.kernels.pointwise import NormForm, plain_norm, plain_rotary, rms_norm, rotary

    fused, turn = (liger.rms_norm, liger.rotary) if device == "cuda" else (rms_norm, rotary)
    forms = (NormForm(1e-5, 0.0, narrow_first=True), NormForm(1e-6, 1.0, narrow_first=False))

    def plain_turn(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(plain_rotary(x, cos.unsqueeze(1), sin.unsqueeze(1)) for x in (q, k))

    def fresh(function: Function) -> Function:
        # Both get copies, as a projection makes new outputs each time: the fused one overwrites them.
        return lambda gate, up: function(gate.clone(), up.clone())

    return Ways(
        [(partial(plain_norm, form=form), partial(fused, form=form)) for form in forms],
        (plain_turn, turn),
        {
            form: (
                fresh(partial(liger.plain_gated, form=form)),
                fresh(partial(liger.gated, form=form, overwrite=True)),
            )
            for form in liger.FORMS
        },
    )


_MODULE = "surefoot.runs.kernel_probes"
DOCUMENTS = Probe(
    DocumentsRequest,
    "forms",
    AttentionTrial,
    _documents,
    lambda form, why: AttentionTrial(form, 0.0, why),
    (_MODULE, "DOCUMENTS"),
)
POINTWISE = Probe(
    PointwiseRequest,
    "parts",
    PointwiseTrial,
    _pointwise,
    lambda part, why: PointwiseTrial(part, 0.0, 0.0, why),
    (_MODULE, "POINTWISE"),
)
