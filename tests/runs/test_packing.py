"""Packed runs as whole runs: the losses of padded ones, the same bytes when resumed, padded rows where they must be."""

import json
import math
import shutil

import pytest

from helpers.faults import gives, lines_giving, raises_fault
from helpers.growing_records import write_sky
from helpers.path_runs import ends, fast_paths, forget, losses, path_config, start
from helpers.tiers import representatives
from helpers.tiny_models import tiny_llama
from surefoot.kernels import packed_attention as kernels
from surefoot.models import forward as documents
from surefoot.planning import packing

STEPS, CUT = 4, 2
LORA = {"kind": "lora", "rank": 8}
# Losses of four steps in fp32: sums in another order, carried on by the optimizer.
FP32_LOSS = 1e-4
WAYS = {
    "lora": {"adapter": LORA},
    "full": {"adapter": None},
    "checkpointed": {"adapter": LORA, "gradient_checkpointing": "on"},
    "pretrain": {"adapter": None, "stage": "pretrain"},
    "a row of at most two": {"adapter": LORA, "batch": {"size": 4, "micro": 2}},
    "a batch of rows": {"adapter": LORA, "batch": {"size": 2, "row_tokens": 256}},
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    write_sky(folder, 22)
    (folder / "texts.json").write_text(json.dumps([{"text": "the heron sees the sky " * n} for n in range(1, 13)]))
    tiny_llama(folder / "base", hidden=64)
    return folder


def config(workplace, output, *, packing="on", steps=STEPS, **way):
    rows = "texts.json" if way.get("stage") == "pretrain" else "rows.json"
    usual = {"batch": {"size": 8}, "optim": {"lr": 1e-3}, "precision": "fp32"}
    times = {
        "duration": f"{steps} steps",
        "eval_every": f"{CUT} steps",
        "checkpoint": {"every": "1 step", "keep": STEPS},
    }
    return path_config(workplace, output, rows=rows, data={"eval": 2, "packing": packing}, **(times | usual | way))


@pytest.fixture(scope="module")
def padded(workplace):
    """A finished LoRA run of padded rows, which nothing touched."""
    start(config(workplace, workplace / "padded", packing="off", adapter=LORA))
    return workplace / "padded"


def chosen(folder):
    return json.loads((folder / "plan.json").read_text())["plan"]["kernels"]["documents"]


@pytest.mark.parametrize("way", representatives(WAYS, "pretrain", "a row of at most two", "a batch of rows"))
def test_a_packed_run_has_the_losses_of_a_padded_one(workplace, tmp_path, way):
    start(config(workplace, tmp_path / "packed", **WAYS[way]))
    start(config(workplace, tmp_path / "padded", packing="off", **WAYS[way]))
    assert losses(tmp_path / "packed") == pytest.approx(losses(tmp_path / "padded"), abs=FP32_LOSS)
    assert (chosen(tmp_path / "packed")["value"], chosen(tmp_path / "padded")["value"]) == ("sdpa", "plain")
    counts = [ends(tmp_path / name, STEPS)[1]["tokens"] for name in ("packed", "padded")]
    assert counts[0] == counts[1]
    assert "documents" in fast_paths(tmp_path / "packed")


def test_a_batch_of_rows_has_the_examples_of_full_rows(workplace, tmp_path):
    """An epoch has every example once, and no more steps than full rows need at half the room."""
    room = 256
    one = config(workplace, tmp_path / "rows", batch={"size": 2, "row_tokens": room}, adapter=LORA, duration="1 epoch")
    start(one)
    results = json.loads((tmp_path / "rows" / "train_results.json").read_text())
    assert results["train_examples"] == 20
    least = results["train_tokens"] / room / 2  # with rows that are all full; first fit never takes twice as many
    assert least <= results["train_steps"] <= math.ceil(2 * least) < 20 / 2


def test_twin_that_packs_and_leaks_is_found_and_padded(workplace, padded, tmp_path, monkeypatch):
    def one_document(q, k, v, found, scale):
        return kernels.sdpa(q, k, v, kernels.documents_of([q.shape[2]], q.device), scale)

    monkeypatch.setitem(documents.FORMS, "sdpa", one_document)
    with raises_fault("SF-FAST-PATH", "data.packing"):
        start(config(workplace, tmp_path / "asked", adapter=LORA))
    monkeypatch.setattr("surefoot.planning.packing._unmeasured", lambda request, forms: _left_open(forms))
    screen = start(config(workplace, tmp_path / "open", packing="auto", adapter=LORA))
    assert "caution: data.packing: " in screen
    assert chosen(tmp_path / "open")["value"] == "plain"
    assert losses(tmp_path / "open") == losses(padded)
    start(config(workplace, tmp_path / "open", packing="auto", adapter=LORA), "resume")  # stays so


def test_twin_that_leaks_is_found_where_no_two_documents_of_a_row_are_compared(workplace, tmp_path, monkeypatch):
    def one_document(q, k, v, found, scale):
        return kernels.sdpa(q, k, v, kernels.documents_of([q.shape[2]], q.device), scale)

    monkeypatch.setattr("surefoot.runs.parity.passes._COMPARED", 1)
    start(config(workplace, tmp_path / "right", adapter=LORA))
    monkeypatch.setitem(documents.FORMS, "sdpa", one_document)
    with raises_fault("SF-FAST-PATH", "data.packing"):
        start(config(workplace, tmp_path / "wrong", adapter=LORA))


def _left_open(forms):
    from surefoot.planning.plan import Choice

    return Choice(forms[0], "for this test", "measured")


@pytest.mark.parametrize("way", representatives(["lora", "pretrain"], "lora"))
def test_a_packed_run_that_goes_on_ends_as_the_one_that_never_stopped(workplace, tmp_path, way):
    noisy = WAYS[way] | {"optim": {"lr": 1e-3, "neftune_alpha": 5.0}}
    if way == "lora":
        noisy |= {"adapter": LORA | {"dropout": 0.1}}
    wanted = config(workplace, tmp_path / "run", **noisy)
    start(wanted)
    uninterrupted = ends(tmp_path / "run", STEPS)
    assert uninterrupted[1]["step"] == STEPS
    forget(tmp_path / "run", range(CUT + 1, STEPS + 1))
    start(wanted, "resume")
    assert ends(tmp_path / "run", STEPS) == uninterrupted
    shutil.rmtree(tmp_path / "run")
    start(config(workplace, tmp_path / "run", packing="off", **noisy))
    assert ends(tmp_path / "run", STEPS) != uninterrupted  # twin: bytes tell rounding apart


LOST, BROKEN = "not passed on to the attention layer", "shapes do not match"


def loses_documents(monkeypatch):
    """As in a family whose layers do not hand on what they are called with."""

    def lost(*_):
        raise documents._lost(LOST)

    monkeypatch.setitem(documents.FORMS, "sdpa", lost)


def fails(monkeypatch):
    def broken(*_):
        raise RuntimeError(f"{BROKEN}\nmore")

    monkeypatch.setitem(documents.FORMS, "sdpa", broken)


BREAKS = [(loses_documents, LOST), (fails, BROKEN)]


def check_padded_because(run, why, screen):
    """The run recorded why it does not pack, and said so."""
    tried = fast_paths(run)["documents"]
    assert (tried["form"], tried["used"]) == ("sdpa", False)
    assert tried["fault"].endswith(why)
    (caution,) = lines_giving(screen, "caution:", "data.packing:", "sdpa")
    assert f"({tried['fault']})" in caution
    assert chosen(run)["value"] == "plain"


@pytest.mark.parametrize(("breaks", "why"), representatives(BREAKS, BREAKS[0]))
def test_a_model_that_packed_rows_cannot_go_through_gets_padded_ones_unless_asked_by_name(
    workplace, padded, tmp_path, monkeypatch, breaks, why
):
    breaks(monkeypatch)
    with raises_fault("SF-FAST-PATH", "data.packing"):
        start(config(workplace, tmp_path / "asked", adapter=LORA))
    assert not (tmp_path / "asked").exists()
    monkeypatch.setattr("surefoot.planning.packing._unmeasured", lambda request, forms: _left_open(forms))
    screen = start(config(workplace, tmp_path / "run", packing="auto", adapter=LORA))
    check_padded_because(tmp_path / "run", why, screen)
    assert losses(tmp_path / "run") == losses(padded)


def test_where_weights_are_shared_out_the_whole_model_is_tried_first(workplace, padded, tmp_path, monkeypatch):
    """As under fsdp2 and ZeRO 3, whose ranks wait for one another within the pass over real examples: there a fault
    ends the run."""
    for module in ("load_models", "parity.passes"):
        monkeypatch.setattr(f"surefoot.runs.{module}.sharder", lambda parallel: "single")
    usual = packing._unmeasured
    monkeypatch.setattr(
        packing, "_unmeasured", lambda request, forms: usual(request, forms) if request == "on" else _left_open(forms)
    )
    start(config(workplace, tmp_path / "sound", packing="auto", adapter=LORA))
    assert chosen(tmp_path / "sound")["value"] == "sdpa"
    loses_documents(monkeypatch)
    screen = start(config(workplace, tmp_path / "run", packing="auto", adapter=LORA))
    check_padded_because(tmp_path / "run", LOST, screen)
    assert losses(tmp_path / "run") == losses(padded)
    with raises_fault("SF-FAST-PATH", "data.packing"):
        start(config(workplace, tmp_path / "asked", adapter=LORA))
    monkeypatch.setattr("surefoot.runs.load_models.documents_fault", lambda model: "")  # twin
    with raises_fault("SF-CONFIG-CONFLICT", "data.packing"):
        start(config(workplace, tmp_path / "untried", packing="auto", adapter=LORA))


def test_a_resumed_run_stays_packed_where_rows_differ_and_ends_where_they_fail(workplace, tmp_path, monkeypatch):
    wanted = config(workplace, tmp_path / "run", packing="auto", adapter=LORA)
    monkeypatch.setattr("surefoot.planning.packing._unmeasured", lambda request, forms: _left_open(forms))
    start(wanted)
    uninterrupted, plan = ends(tmp_path / "run", STEPS), chosen(tmp_path / "run")
    forget(tmp_path / "run", range(CUT + 1, STEPS + 1))
    with monkeypatch.context() as strict:
        strict.setattr("surefoot.runs.parity.differences.LIMITS", {"fp32": -1.0})
        screen = start(wanted, "resume")
        assert lines_giving(screen, "caution:", "data.packing:", "sdpa", -1)
        assert (ends(tmp_path / "run", STEPS), chosen(tmp_path / "run")) == (uninterrupted, plan)
        found = fast_paths(tmp_path / "run")["documents"]
        assert (found["used"], found["outside"], found["limits"]["gradient"]) == (True, True, -1.0)
        start(config(workplace, tmp_path / "fresh", packing="auto", adapter=LORA))  # twin: a fresh start falls back
        assert chosen(tmp_path / "fresh")["value"] == "plain"
        assert ends(tmp_path / "fresh", STEPS) != uninterrupted
    forget(tmp_path / "run", range(CUT + 1, STEPS + 1))
    fails(monkeypatch)
    with raises_fault("SF-FAST-PATH", "data.packing"):
        start(wanted, "resume")
    assert chosen(tmp_path / "run") == plan


def with_dropout(wanted):
    return wanted.model_copy(update={"model": wanted.model.model_copy(update={"dropout": 0.1})})


def test_dropout_that_comes_on_resume_ends_packing_and_it_is_said(workplace, tmp_path, monkeypatch):
    monkeypatch.setattr("surefoot.planning.packing._unmeasured", lambda request, forms: _left_open(forms))
    start(config(workplace, tmp_path / "run", packing="auto", adapter=LORA))
    assert chosen(tmp_path / "run")["value"] == "sdpa"
    longer = with_dropout(config(workplace, tmp_path / "run", packing="auto", steps=STEPS + 1, adapter=LORA))
    with monkeypatch.context() as broken:  # twin
        broken.setattr("surefoot.runs.plan_with_data._drop_fast_paths", lambda anew, plan, *names: plan)
        with raises_fault("SF-CONFIG-CONFLICT", "data.packing"):
            start(longer, "resume")
    screen = start(longer, "resume")
    (line,) = [line for line in screen.splitlines() if "data.packing" in line and gives(line, "sdpa")]
    assert gives(line, "plain")
    assert chosen(tmp_path / "run")["value"] == "plain"


def test_dropout_that_packing_by_name_forbids_is_refused_with_what_can_be_done(workplace, tmp_path):
    start(config(workplace, tmp_path / "run", adapter=LORA))
    longer = with_dropout(config(workplace, tmp_path / "run", steps=STEPS + 1, adapter=LORA))
    with raises_fault("SF-CONFIG-CONFLICT", "data.packing"):
        start(longer, "resume")


def test_a_bos_that_is_scaled_is_scaled_in_every_document(workplace, tmp_path):
    scaled = {"adapter": LORA, "bos": {"scale": 0.1}}
    start(config(workplace, tmp_path / "packed", **scaled))
    start(config(workplace, tmp_path / "padded", packing="off", **scaled))
    assert losses(tmp_path / "packed") == pytest.approx(losses(tmp_path / "padded"), abs=FP32_LOSS)


@pytest.mark.parametrize(
    "way",
    [
        {"attention": "eager"},
        pytest.param({"compile": "default"}, marks=pytest.mark.slow),
        {"model": {"dropout": 0.1}},
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(workplace, tmp_path, way):
    wanted = config(
        workplace, tmp_path / "run", adapter=LORA, **{key: one for key, one in way.items() if key != "model"}
    )
    if "model" in way:
        wanted = wanted.model_copy(update={"model": wanted.model.model_copy(update=way["model"])})
    with raises_fault("SF-CONFIG-CONFLICT", "data.packing"):
        start(wanted)
