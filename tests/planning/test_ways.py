"""What fits where a run does not: each way is a plan that fits, and its speed can be worked out by hand."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from helpers.faults import gives
from helpers.model_layouts import LLAMA31_8B, llama3_tokenizer, model_facts, run_config
from surefoot.commands.main import main
from surefoot.families.tokenizer_facts import read_tokenizer_facts
from surefoot.planning import ways as module
from surefoot.planning.memory import fits
from surefoot.planning.resolve import resolve
from surefoot.planning.scale import FABRICS
from surefoot.planning.ways import is_too_large, way_cells, ways_to_fit, with_keys
from surefoot.system.errors import Fault, InputError
from surefoot.system.hardware import GIB, preset

DOCUMENT = Path(__file__).parents[2] / "docs" / "memory.md"
OFFLOAD = {"parallel.offload": "optimizer"}
FULL = {"adapter": None, "batch": {"size": 32, "micro": 2}, "data": {"train": "t.jsonl", "max_length": 512}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("8b")
    llama3_tokenizer(found, chat=True, pad=True)
    (found / "config.json").write_text(json.dumps(LLAMA31_8B | {"architectures": ["LlamaForCausalLM"]}))
    return found


@pytest.fixture(scope="module")
def planning(folder):
    """(hardware, config) -> its ways, and the function that resolves a changed config."""
    model, tokenizer = model_facts(folder, LLAMA31_8B), read_tokenizer_facts(folder)

    def of(machine, **sections):
        config = run_config(**sections)
        resolved = partial(
            resolve, model=model, tokenizer=tokenizer, hardware=machine, measurements=None, environment={}
        )
        made = lambda other, ranks: resolved(other, ranks=ranks)  # noqa: E731
        return ways_to_fit(config, made, model, machine), config, made

    return of


def test_each_way_is_a_plan_that_fits(planning):
    ways, config, made = planning(preset("a40"), **FULL)
    assert len(ways) > 3
    for way in ways:
        assert fits(way.plan.memory)
        ranks = module.RanksFacts(way.gpus, way.gpus, requested=way.gpus > 1)
        assert made(with_keys(config, way.keys), ranks) == way.plan
    costs = [way.gpus / way.rate for way in ways]
    assert costs == sorted(costs)


def test_what_does_not_fit_is_no_way(planning, monkeypatch):
    monkeypatch.setattr(module, "fits", lambda memory: True)
    ways, _, _ = planning(preset("a40"), **FULL | {"data": {"train": "t.jsonl", "max_length": 32_768}})
    assert not all(fits(way.plan.memory) for way in ways)


def test_the_smallest_number_of_gpus_is_named(planning):
    ways, config, made = planning(preset("a40"), **FULL)
    (many,) = [way for way in ways if way.gpus > 1]
    half = many.gpus // 2
    fewer = made(with_keys(config, {**many.keys, "parallel.nproc": half}), module.RanksFacts(half, half, True))
    assert not fits(fewer.memory)


def test_ranks_hold_all_weights_in_host_memory_before_they_are_sharded(planning):
    """8,030,261,248 weights in fp32 in each of 8 processes: 239.3 GiB, where a host has them. LoRA's base stays in its
    files."""
    (many,) = [way for way in planning(preset("a40"), **FULL)[0] if way.gpus > 1]
    assert (many.gpus, many.host) == (8, 8 * 4 * 8_030_261_248)
    assert gives(way_cells(many)[1], "239.3")
    small, large = (planning(replace(preset("a40"), host=size * GIB), **FULL)[0] for size in (250, 300))
    assert [any(way.gpus > 1 for way in ways) for ways in (small, large)] == [False, True]  # 224 GiB are usable of 250
    assert not any(way.host for way in planning(preset("l4"), **FULL | {"adapter": {"kind": "lora"}})[0])


def test_a_way_that_only_adds_a_change_is_left_out(planning, monkeypatch):
    asked = {"adapter": {"kind": "lora", "rank": 16}, "batch": {"size": 64, "micro": 64}}
    ways, _, _ = planning(preset("a40"), gradient_checkpointing="off", **asked)
    free = {"batch.micro": "auto", "gradient_checkpointing": "auto"}
    assert [way.keys for way in ways if way.gpus == 1] == [free]
    monkeypatch.setattr(module, "_is_better", lambda one, than: False)
    ways, _, _ = planning(preset("a40"), gradient_checkpointing="off", **asked)
    assert len([way for way in ways if way.gpus == 1]) > 1


LORA = {"adapter": {"kind": "lora", "rank": 16}, "batch": {"size": 64}, "data": FULL["data"]}
FP16 = {"precision.compute": "fp16"}


def test_a_gpu_without_bf16_is_offered_fp16_first(planning):
    """A T4's products in fp32 are eight times slower, and twice as large."""
    first, *others = planning(preset("t4"), **LORA)[0]
    assert (first.keys, first.gpus) == ({"precision.base": "nf4", **FP16}, 1)
    assert first.rate
    assert {"precision.base": "nf4"} in [way.keys for way in others]
    for other in (planning(preset("l4"), **LORA, precision="fp32"), planning(preset("t4"), **LORA, precision="fp32")):
        assert other[0]
        assert not any("precision.compute" in way.keys for way in other[0])  # twins: it has bf16; fp32 was asked for


def test_twin_fp32_as_fast_as_fp16_is_noticed(planning, monkeypatch):
    monkeypatch.setattr(module, "_FP32", 8)
    with pytest.raises(AssertionError):
        test_a_gpu_without_bf16_is_offered_fp16_first(planning)


def test_dora_becomes_lora_only_where_it_does_not_fit(planning, monkeypatch):
    def kinds():
        ways, _, _ = planning(preset("t4"), **LORA | {"adapter": {"kind": "dora", "rank": 16}})
        return {way.keys.get("adapter.kind") for way in ways}

    assert kinds() == {None}
    with monkeypatch.context() as patched:
        patched.setattr(module, "_is_better", lambda one, other: False)
        assert kinds() == {None, "lora"}
    patched_fits = module._fits
    keeps = lambda config, *how: None if config.adapter.kind == "dora" else patched_fits(config, *how)  # noqa: E731
    monkeypatch.setattr(module, "_fits", keeps)
    assert kinds() == {"lora"}


def test_host_memory_decides_too(planning):
    small = replace(preset("a40"), host=100 * GIB)  # 125.5 GiB are needed with moments in fp32, 86.7 in 8 bits
    ways, _, _ = planning(small, **FULL)
    offloaded = [way for way in ways if way.plan.parallel.offload != "none"]
    assert [way.keys["optim.name"] for way in offloaded] == ["adamw_8bit"]


def test_host_memory_without_room_for_anything_else_is_no_way(planning, monkeypatch):
    tight = replace(preset("a40"), host=128 * GIB)  # 114.2 GiB are usable

    def optimizers():
        ways, _, _ = planning(tight, **FULL)
        return {way.keys.get("optim.name") for way in ways if way.plan.parallel.offload != "none"}

    assert optimizers() == {"adamw_8bit"}
    monkeypatch.setattr(module, "fits_host", lambda memory: True)
    assert None in optimizers()


def test_a_rate_by_hand(planning):
    """Offloaded, 16 micro-batches of 2 x 512 tokens, all of them learned: 6 FLOPs of each of 6,979,321,856 weights of
    layers and 525,336,576 of the head, and attention of 4,096 numbers in 32 layers, three times forward; 16 times the
    gradients and once the weights over 0.8 of PCIe; AdamW over 8,030,261,248 weights."""
    ways, _, _ = planning(preset("a40"), **FULL)
    (way,) = [way for way in ways if way.keys == OFFLOAD]
    tokens = 32 * 512
    attention = 3 * 2 * 32 * 4096 * 32 * (512 * 512 + 512)
    compute = (6 * tokens * (6_979_321_856 + 525_336_576) + attention) / (0.4 * FABRICS["a40"].peak)
    weights = 8_030_261_248
    copies = 17 * (4 * weights - 2 * 6_979_321_856) / (0.8 * 31.5e9)
    host = weights * (28 + 6 + 16 * 10) / 100e9
    assert way.plan.batch.accumulation == 16
    assert way.rate == pytest.approx(tokens / (compute + copies + host), rel=0.01)


def test_no_rate_is_given_where_it_is_not_known(planning):
    old, _, _ = planning(preset("v100-32"), **FULL)
    assert {way.rate is None for way in old if way.plan.precision.compute.value == "fp32"} == {True}
    ways, _, _ = planning(replace(preset("a40"), name="an unknown GPU"), **FULL)
    assert ways
    assert all(way_cells(way)[2] == "?" for way in ways)


def test_without_rates_the_order_is_that_of_an_a40(planning, monkeypatch):
    """LoRA comes before an optimizer in host memory, which is tried first."""

    def keys(machine):
        return [way.keys for way in planning(machine, **FULL)[0]]

    named, other = preset("a40"), replace(preset("a40"), name="an unknown GPU")
    assert keys(other) == keys(named)
    assert keys(other)[0]["adapter.kind"] == "lora"
    monkeypatch.setattr(module, "_rate", lambda *given: 1.0)
    assert keys(other)[0] == OFFLOAD


def test_only_memory_has_ways():
    memory, key = Fault("model", "needs more", code="SF-MEMORY"), Fault("optim.lr", "is wrong", code="SF-CONFIG-VALUE")
    assert is_too_large(InputError([memory]))
    assert not is_too_large(InputError([memory, key]))


def planned(folder: Path, tmp_path: Path, *overrides: str, code: int) -> str:
    path = tmp_path / "run.yaml"
    (tmp_path / "train.json").write_text("[]")  # only that it is there is looked at
    path.write_text(
        f"stage: sft\nmodel: {folder}\ndata: {{train: {tmp_path}/train.json, max_length: 512}}\n"
        "batch: {size: 32, micro: 2}\noutput: runs/new\n"
    )
    result = CliRunner().invoke(main, ["plan", str(path), "--hardware", "a40", *overrides])
    assert result.exit_code == code, result.output
    return result.output


def keys_of(output: str) -> list[list[str]]:
    """The overrides in the last column of each line of the table."""
    lines = output[output.index("tokens/s  set") :].splitlines()[1:]
    return [[word for word in line.split() if "=" in word] for line in lines if "=" in line]


def test_what_is_printed_can_be_typed(folder, tmp_path):
    found = keys_of(planned(folder, tmp_path, code=2))
    assert len(found) > 3
    alone = [keys for keys in found if not any(key.startswith("parallel.nproc") for key in keys)]
    for keys in alone[:2]:
        planned(folder, tmp_path, *keys, code=0)


ROWS = {"Step 1 (Full)": (), "Step 2": ("stage=reward",), "Step 3 (Both)": ("stage=ppo",)}


@pytest.mark.parametrize("row", ROWS)
def test_the_documents_rows(folder, tmp_path, row):
    """docs/memory.md has what is printed for the four rows of a table that promises less."""
    output = planned(folder, tmp_path, *ROWS[row], code=2)
    needed = re.search(r"need (\S+ GiB)", output)
    assert needed
    table = [line for line in output.splitlines() if line.startswith("  ") and ("=" in line or "tokens/s" in line)]
    section = DOCUMENT.read_text().split(f"**{row}**")[1]
    assert f"needs {needed[1]}" in section.split("```")[0]
    assert section.split("```text\n")[1].split("\n```")[0].splitlines() == table


def test_the_documents_row_that_fits(folder, tmp_path):
    output = planned(folder, tmp_path, "adapter.kind=lora", code=0)
    total = re.search(r"^total +(\S+ GiB)", output, re.MULTILINE)
    assert total
    section = DOCUMENT.read_text().split("**Step 1 (LoRA)**")[1].splitlines()[0]
    assert f"takes {total[1]}" in section
