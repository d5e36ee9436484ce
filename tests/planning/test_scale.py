"""The forecast for many GPUs, against numbers worked out by hand, and against the tables of the document."""

from pathlib import Path

import pytest

from helpers.faults import raises_fault
from helpers.model_layouts import LLAMA31_8B, llama3_tokenizer, model_facts, run_config
from surefoot.commands.plan import forecast_scale
from surefoot.planning import scale as module
from surefoot.report.tables.plan import scale_cells
from surefoot.system import hardware
from surefoot.system.errors import InputError

DOCUMENT = Path(__file__).parents[2] / "docs" / "scale.md"
LLAMA31_70B = LLAMA31_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
PARAMETERS_8B = 8_030_261_248  # as the model card of Llama 3.1 8B has it
FULL = None
LORA = {"kind": "lora", "rank": 16}


@pytest.fixture(scope="module")
def forecast(tmp_path_factory):
    """(size, adapter) -> rows for H100s, forecast once for each efficiency."""
    made, known = {}, {}
    for name, config in (("8B", LLAMA31_8B), ("70B", LLAMA31_70B)):
        folder = tmp_path_factory.mktemp(name)
        llama3_tokenizer(folder, chat=True, pad=True)
        model_facts(folder, config)
        made[name] = folder

    def run(name, adapter, machine="h100"):
        key = name, repr(adapter), machine, module.EFFICIENCY
        if key not in known:
            data = {"train": "t.jsonl", "max_length": 4096}
            known[key] = forecast_scale(run_config(model=str(made[name]), data=data, adapter=adapter), machine)
        return known[key]

    return run


def row(rows, gpus, engine):
    return next(one for one in rows if (one.gpus, one.engine) == (gpus, engine))


def test_traffic_is_what_the_formulas_say(forecast):
    rows = forecast("8B", FULL)
    gradients = 4 * PARAMETERS_8B
    assert row(rows, 8, "ddp").traffic == pytest.approx(2 * 7 / 8 * gradients / 450e9)
    assert row(rows, 64, "zero 2").traffic == pytest.approx(2 * 63 / 64 * gradients / 50e9)
    assert row(rows, 512, "fsdp2").traffic == pytest.approx(4 * 511 / 512 * 3 * gradients / 50e9)
    assert row(rows, 1, "ddp").traffic == 0


def test_states_are_shared_out(forecast):
    """AdamW over fp32 weights: 4 bytes of weight, 4 of gradient, 8 of moments; the rest of each row is the same."""
    rows = forecast("8B", FULL)
    few, many = row(rows, 8, "zero 2"), row(rows, 64, "zero 2")
    assert few.checkpointing
    assert many.checkpointing
    assert few.memory - many.memory == pytest.approx(12 * PARAMETERS_8B * (1 / 8 - 1 / 64), abs=2)


def test_compute_is_six_operations_for_a_parameter_and_token(forecast):
    """Full training without checkpointing: 6 N per token with N without the embedding, and attention."""
    found = row(forecast("8B", FULL), 512, "fsdp2")
    assert not found.checkpointing
    dense = 6 * (PARAMETERS_8B - 128_256 * 4096 - 65 * 4096)
    attention = 3 * 2 * 32 * 4096 * 4097
    assert found.compute * 989e12 * 0.4 / (4 * 4096) == pytest.approx(dense + attention)


def test_only_what_fits_is_promised(forecast):
    rows = forecast("70B", FULL)
    assert not any(one.fits for one in rows if one.gpus <= 8 or one.engine == "ddp")
    assert row(rows, 64, "fsdp2").fits


def test_a_machine_without_known_links_is_refused(forecast):
    with pytest.raises(InputError) as caught:
        forecast("8B", FULL, "48GiB")
    assert [(one.where, one.code) for one in caught.value.faults] == [("--hardware", "SF-USE-FLAG")]


def test_the_document_has_these_tables(forecast):
    text = DOCUMENT.read_text(encoding="utf-8")
    for size in ("8B", "70B"):
        for adapter in (FULL, LORA):
            rows = "\n".join(f"| {' | '.join(scale_cells(row))} |" for row in forecast(size, adapter))
            assert f"---|\n{rows}\n" in text.replace("--- |", "---|"), (size, adapter)


def test_twin_with_another_efficiency_it_would_not(forecast, monkeypatch):
    monkeypatch.setattr(module, "EFFICIENCY", 0.5)
    with pytest.raises(AssertionError):
        test_the_document_has_these_tables(forecast)


# Dense products of 16 bits with sums in fp32, in 1e12: where a datasheet has them with sparsity, that figure halved.
DATASHEETS = {
    "t4": 65,
    "v100": 125,
    "v100-32": 125,
    "a10": 250 / 2,
    "a40": 299.4 / 2,
    "a6000": 309.7 / 2,
    "l4": 242 / 2,
    "l40s": 733 / 2,
    "rtx3090": 142 / 2,
    "rtx4090": 330.3 / 2,
    "rtx5090": 419 / 2,
    "a100": 624 / 2,
    "a100-80": 624 / 2,
    "a100-40": 624 / 2,
    "h100": 1979 / 2,
    "h200": 1979 / 2,
    "b200": 36000 / 8 / 2,
    "mi300x": 2614.9 / 2,
}
PRINTED = 0.02  # the L40S' datasheet has 362.05 and, with sparsity, 733


def test_rates_are_dense():
    gpus = {name: machine for name, machine in hardware._PRESETS.items() if machine.kind == "cuda"}
    rates = {name: found.peak / 1e12 for name, machine in gpus.items() if (found := module.fabric_of(machine))}
    assert rates == pytest.approx(DATASHEETS, rel=PRINTED)


def test_rates_of_fp32_are_not_known(forecast):
    """A V100 computes no bf16, so a plan that is free to choose takes fp32."""
    with raises_fault("SF-USE-FLAG", "precision"):
        forecast("8B", LORA, "v100")
