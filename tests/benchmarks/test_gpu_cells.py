"""What the comparisons on a GPU should show, beside limits that were computed by hand."""

import dataclasses
import json

import pytest

import bases
import gpu_cells
import peer_sides
import peer_world
from helpers.benchmark_programs import RECORDS, asked
from helpers.plans import adapter_plan
from surefoot.models.facts import facts_of
from surefoot.planning.limits import Work, step_flops

# 8 B parameters on 788 TFLOP/s and 4.3 TB/s: method, tokens of an example, share learned, GFLOP a token, tokens/s.
# LoRA, 4,096 tokens, all learned:
#   4 · 6.9793 G (layers) + 3 · 2 · 32 · 4096 · 4097 (attention) + 6 · 83.886 M (rank 32) + 4 · 525.34 M (head)
#   - 2 · 4096 · 6144 (the first layer's inputs have no gradient) = 33.69 G
#   33.69 G / 788 T + 3 · 32 · 2 · 77,824 B / 4.3 TB = 46.2 µs
HAND = [
    ("lora", 4096, 1.0, 33.69, 21_629),
    ("lora", 1024, 1.0, 31.28, 23_166),
    ("lora", 1024, 0.25, 29.05, 24_786),
    ("full", 4096, 1.0, 48.25, 15_455),
    ("full", 1024, 1.0, 45.83, 16_223),
    ("full", 1024, 0.25, 42.51, 17_416),
]
ROUNDING = 3e-4  # of the figures above


def facts(folder, shape):
    bases.write_config(folder, ["a heron is a bird"], shape)
    return facts_of(folder)


@pytest.fixture(scope="module")
def of_8b(tmp_path_factory):
    return facts(tmp_path_factory.mktemp("8b"), bases.SIZES["8b"])


def limit(model, method, length, learned, shape=bases.SIZES["8b"]) -> tuple[float, float]:
    """GFLOP a token, tokens/s."""
    targets = [module.name for module in model.layer_linears]
    adapter = adapter_plan(targets, rank=32) if method == "lora" else None
    work = Work(length, length * length, int(learned * length))
    seconds = gpu_cells.seconds_per_token(model, shape, work, adapter)
    return step_flops(model, work, adapter).needed / length / 1e9, 1 / seconds


@pytest.mark.parametrize(("method", "length", "learned", "flops", "rate"), HAND)
def test_limits_are_those_computed_by_hand(of_8b, method, length, learned, flops, rate):
    assert limit(of_8b, method, length, learned) == pytest.approx((flops, rate), rel=ROUNDING)


def test_the_first_row_by_hand():
    layers = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
    added = 32 * 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14_336))
    attention, head = 2 * 32 * 4096 * 4097, 128_256 * 4096
    flops = 4 * layers + 3 * attention + 6 * added + 4 * head - 2 * 4096 * (4096 + 2 * 1024)
    assert flops / 1e9 == pytest.approx(HAND[0][3], rel=ROUNDING)
    assert 1 / (flops / 788e12 + 192 * 77_824 / 4.3e12) == pytest.approx(HAND[0][4], rel=ROUNDING)


def test_twin_a_model_without_shared_keys_has_other_limits(tmp_path):
    shape = bases.SIZES["8b"]
    other = dataclasses.replace(shape, own={**shape.own, "num_key_value_heads": 32})
    flops, rate = limit(facts(tmp_path, other), "lora", 4096, 1.0, other)
    assert flops > 1.02 * HAND[0][3]
    assert rate < 0.98 * HAND[0][4]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "data.json"
    path.write_text(json.dumps(RECORDS))
    return path


def expected(data, *words):
    call = asked("--data", str(data), "--size", "tiny", "--batch", "8", "--steps", "5", *words, device="cuda")
    return gpu_cells.expected(call)


def test_in_the_equal_league_every_example_has_the_length_that_is_asked_for(data):
    found = expected(data, "--league", "equal", "--length", "128", "--micro", "2")
    assert found.tokens == 8 * 128
    assert found.plan.batch.micro.value == 2


def test_twin_texts_that_are_not_cut_to_the_length_would_be_noticed(data, monkeypatch):
    monkeypatch.setattr(peer_world, "_ENDS", 1)  # then a text is one token too long, which becomes another example
    assert expected(data, "--league", "equal", "--length", "128").tokens != 8 * 128


def test_more_sides_and_more_rounds_take_more_minutes(data):
    few = expected(data, "--sides", "Liger")
    assert few.names == (peer_sides.OWN, "HF + Liger, autocast, micro 8", *few.names[2:])
    assert expected(data).minutes > few.minutes
    assert expected(data, "--rounds", "3").minutes > 2 * expected(data).minutes / 1.5


@pytest.mark.parametrize("name", gpu_cells.CELLS)
def test_a_cell_is_words_that_peers_reads(name, tmp_path):
    cell = gpu_cells.CELLS[name]
    call = gpu_cells.asked_of(gpu_cells.words_of(cell, tmp_path))
    assert (call.device, call.data) == ("cuda", tmp_path / cell.data)
    assert name.startswith(f"{call.size}-{call.adapter}")
    assert ("dialogues" in name) is (call.template == "vicuna")
    assert call.batch % 8 == 0


def test_the_cell_that_others_publish_is_as_theirs(tmp_path):
    call = gpu_cells.asked_of(gpu_cells.words_of(gpu_cells.CELLS["8b-lora"], tmp_path))
    assert (call.length, call.rank, call.micro, call.league) == (4096, 16, 2, "equal")


def test_an_unknown_cell_is_named(monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpu_cells.py", "9b"])
    with pytest.raises(SystemExit, match="no cell '9b'; there are 8b-lora"):
        gpu_cells.main()


def test_a_list_runs_nothing(data, monkeypatch, tmp_path, capsys):
    cell = gpu_cells.Cell(["--size", "tiny", "--adapter", "lora", "--batch", "8"], data.name, "an aim")
    monkeypatch.setattr(gpu_cells, "CELLS", {"one": cell})
    monkeypatch.setattr(gpu_cells.subprocess, "run", lambda *_, **__: pytest.fail("began a run"))
    words = ["--list", "--data-folder", str(data.parent), "--results", str(tmp_path), "--keep", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["gpu_cells.py", *words])
    gpu_cells.main()
    text = capsys.readouterr().out
    assert "aim: an aim" in text
    assert "minutes by the guesses" in text
