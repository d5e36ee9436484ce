"""A formula that is wrong by little, which 16 bits hide, is named by doctor: every fast path goes in fp32 as well."""

from functools import partial
from itertools import product

import pytest
import torch

from helpers.doctor_runs import clean_base, clean_run
from helpers.tiers import representatives
from surefoot.commands.doctor import parity
from surefoot.commands.doctor.parity import own_pass, parity_lines
from surefoot.kernels import adapters
from surefoot.kernels import packed_attention as documents
from surefoot.models.fast import adapters as fast_adapters
from surefoot.models.fast import pointwise as fast_pointwise
from surefoot.models.forward import causal_model
from surefoot.runs.parity import in_fp32
from surefoot.runs.parity.differences import LIMITS
from surefoot.runs.trial import ready
from surefoot.system.errors import EnvironmentFault

ROUNDING = 2e-5  # of sums in fp32 taken in another order
SCALED = 1.02
ALL = {"adapter": "fast", "loss": "chunked", "last_block": "pruned", "pointwise": "fused"}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("formulas")
    clean_base(folder / "base")
    return folder


@pytest.fixture
def lines_of(workplace, monkeypatch):
    """Doctor's lines of a run in bf16 with every fast path. What is planted comes in behind the run's own pass, before
    which a comparison stands that sees the coarser ones. at_once: before it."""

    def lines(plant=None, kind="lora", packing="on", *, at_once=False, **changes):
        config = clean_run(
            workplace,
            workplace / "base",
            adapter={"kind": kind, "rank": 4},
            data={"train": str(workplace / "train.json"), "max_length": 128, "packing": packing},
            batch={"size": 16, "micro": 6},
            **{"precision": "bf16", "kernels": ALL} | changes,
        )
        if plant and at_once:
            plant(monkeypatch)
        with ready(config, 1) as one:
            own, plan = own_pass(one), one.loaded.plan
        assert all(getattr(plan.kernels, name).value == value for name, value in ALL.items())
        if plant and not at_once:
            plant(monkeypatch)
        return list(parity_lines(config, plan, own, None))

    return lines


def error_of(line):
    return float(line.value.split("by ")[1].split(";")[0])


RIGHT = product(["lora", "dora"], ["on", "off"])


@pytest.mark.parametrize(("kind", "packing"), representatives(RIGHT, ("lora", "off"), ("dora", "on")))
def test_right_formulas_agree_in_fp32(lines_of, kind, packing):
    whole, formula = lines_of(kind=kind, packing=packing)
    assert (whole.verdict, formula.verdict, formula.where) == ("ok", "ok", "fp32")
    rows = "data.packing" if packing == "on" else "attention"
    assert all(name in formula.value for name in (rows, *(f"kernels.{name}" for name in ALL)))
    assert error_of(formula) < ROUNDING < error_of(whole)


def scaled(monkeypatch):
    """An adapter's scale is too large by a fiftieth."""
    real = fast_adapters._Adapter

    def wrong(name, a, b, magnitude, scale, dropout, drops):
        return real(name, a, b, magnitude, SCALED * scale, dropout, drops)

    monkeypatch.setattr(fast_adapters, "_Adapter", wrong)


def shifted(monkeypatch):
    """Queries are turned as if they stood one place further on."""
    real = fast_pointwise.rotary

    def wrong(q, k, cos, sin, *args, **kwargs):
        further = real(q, k, cos.roll(-1, -2), sin.roll(-1, -2), *args, **kwargs)
        return further[0], real(q, k, cos, sin, *args, **kwargs)[1]

    monkeypatch.setattr(fast_pointwise, "install", partial(fast_pointwise.install, rotate=wrong))


def hears_one_more(monkeypatch):
    """A document of a packed row begins with the last token of the one before it."""

    def wrong(q, k, v, found, scale):
        first, second, *others = found.lengths
        lengths = (first - 1, second + 1, *others)
        return documents.plain(q, k, v, documents.documents_of(lengths, q.device), scale)

    for form in documents.FORMS:
        monkeypatch.setitem(documents.FORMS, form, wrong)


def sees_the_next(monkeypatch):
    """A query sees the token behind it."""

    def wrong(q, k, v, found, scale):
        parts = zip(*(one.split(list(found.lengths), 2) for one in (q, k, v)), strict=True)
        outputs = []
        for a, b, c in parts:
            length = a.shape[2]
            mask = torch.ones(length, length, dtype=torch.bool).tril(1)
            outputs.append(
                torch.nn.functional.scaled_dot_product_attention(a, b, c, mask, scale=scale, enable_gqa=True)
            )
        return torch.cat(outputs, dim=2)

    for form in documents.FORMS:
        monkeypatch.setitem(documents.FORMS, form, wrong)


def no_magnitude(monkeypatch):
    """DoRA's m does not learn."""
    real = adapters._magnitude_gradient
    monkeypatch.setattr(adapters, "_magnitude_gradient", lambda *args, **kwargs: 0 * real(*args, **kwargs))


def sixteen_bits_only(monkeypatch):
    """As the kernel for packed rows on NVIDIA GPUs is."""

    def refuse(q, k, v, found, scale):
        raise RuntimeError("expected a type of 16 bits")

    for form in documents.FORMS:
        monkeypatch.setitem(documents.FORMS, form, refuse)


# Of each the adapter that it is planted in, and the key that has to be named.
PLANTED = {
    scaled: ("lora", "kernels.adapter"),
    shifted: ("lora", "kernels.pointwise"),
    hears_one_more: ("lora", "data.packing"),
    sees_the_next: ("lora", "data.packing"),
    no_magnitude: ("dora", "kernels.adapter"),
}


@pytest.mark.parametrize("plant", representatives(PLANTED, shifted, no_magnitude))
def test_a_wrong_formula_is_named(lines_of, plant):
    kind, key = PLANTED[plant]
    _, *found = lines_of(plant, kind)
    assert [(one.code, one.verdict, one.where, one.exit_code) for one in found] == [("FAST-PATH", "fault", key, 3)]
    assert f"set {key} to " in found[0].fix


def test_a_run_sees_a_wrong_scale_before_step_1_in_fp32(lines_of):
    with pytest.raises(EnvironmentFault) as refused:
        lines_of(scaled, at_once=True)
    assert [(fault.where, fault.code) for fault in refused.value.faults] == [("kernels.adapter", "SF-FAST-PATH")]


def test_what_the_run_itself_computes_in_16_bits_hides_a_wrong_scale(lines_of, monkeypatch):
    """Neither the comparison before step 1, where that has no room for fp32, nor the whole run against plain fp32 sees
    it."""
    monkeypatch.setattr(in_fp32, "usable", lambda available: 0)
    whole, formula = lines_of(scaled, at_once=True)
    assert (whole.verdict, formula.verdict, formula.where) == ("ok", "fault", "kernels.adapter")


def test_twin_at_the_limit_of_16_bits_formulas_would_pass(lines_of, monkeypatch):
    monkeypatch.setattr(in_fp32, "LIMIT", LIMITS["bf16"])
    assert [one.verdict for one in lines_of(scaled)] == ["ok", "ok"]


def test_a_run_in_fp32_is_its_own_proof(lines_of):
    assert [one.verdict for one in lines_of(precision="fp32")] == ["ok"]


def test_a_path_that_does_not_go_in_fp32_is_not_called_wrong_and_the_others_are_looked_at(lines_of):
    _, rest, rows = lines_of(sixteen_bits_only)
    assert (rest.verdict, rest.where) == ("ok", "fp32")
    assert "data.packing" not in rest.value
    assert (rows.verdict, rows.where, rows.exit_code) == ("unknown", "data.packing", 0)
    assert "16 bits" in rows.value


def test_beside_such_a_path_a_wrong_one_is_named(lines_of):
    def both(monkeypatch):
        sixteen_bits_only(monkeypatch)
        scaled(monkeypatch)

    _, wrong, rows = lines_of(both)
    assert (wrong.verdict, wrong.where, rows.verdict) == ("fault", "kernels.adapter", "unknown")


def test_the_twin_is_left_as_it_was(lines_of, monkeypatch):
    """Each path is taken out before the next goes in."""
    seen = []
    real = in_fp32.compare_formulas

    def watched(loaded, *args):
        def state():
            modules = list(loaded.engine.model.modules())
            forwards = [module for module in modules if "forward" in vars(module)]
            return len(forwards), causal_model(loaded.policy).config._attn_implementation

        before = state()
        found = real(loaded, *args)
        seen.append((before, state()))
        return found

    monkeypatch.setattr(parity, "compare_formulas", watched)
    lines_of(scaled)
    ((before, after),) = seen
    assert before == after == (0, "eager")
