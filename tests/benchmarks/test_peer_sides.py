"""Who takes part in the comparison with other trainers, by league, device and what is installed."""

import pytest

import peer_sides
from helpers.benchmark_programs import asked

LONGEST = 512


def names(call, longest=LONGEST, has=lambda python, package: True, say=lambda text: None) -> list[str]:
    return [side.name for side in peer_sides.sides(call, longest, has=has, say=say)]


def micros(call, longest=LONGEST) -> list[int]:
    found = peer_sides.sides(call, longest, has=lambda python, package: True, say=lambda text: None)
    return [side.settings["micro"] for side in found if side.name != peer_sides.OWN]


@pytest.mark.parametrize(
    ("words", "peers"),
    [
        (
            ["--league", "tuned"],
            ["autocast, micro 8", "autocast, micro 4", "bf16 weights, micro 8", "bf16 weights, micro 4"],
        ),
        (["--league", "tuned", "--adapter", "full"], ["autocast, micro 8", "autocast, micro 4"]),
        (["--league", "defaults"], ["defaults"]),
    ],
)
def test_on_a_cpu_nobody_is_new(words, peers):
    assert names(asked(*words)) == ["surefoot", *(f"HF + PEFT, {name}" for name in peers)]


def test_on_a_gpu_all_that_is_installed_takes_part():
    cell = asked("--size", "8b", "--league", "equal", "--length", "4096", "--micro", "2", "--batch", "8", device="cuda")
    assert names(cell, 4096) == [
        "surefoot",
        "HF + PEFT, bf16 weights, micro 2",
        "HF + Liger, bf16 weights, micro 2",
        "Unsloth, micro 2",
        "HF + PEFT + FlashAttention, bf16 weights, micro 2",
        "HF + Liger + FlashAttention, bf16 weights, micro 2",
    ]


def test_what_is_not_installed_is_left_out_with_a_line_each():
    said: list[str] = []
    assert names(asked("--size", "8b", device="cuda"), has=lambda python, package: False, say=said.append) == [
        "surefoot",
        "HF + PEFT, bf16 weights, micro 12",
    ]
    assert [line.split(" is left out")[0] for line in said] == ["HF + Liger", "Unsloth", "HF with FlashAttention"]


def test_another_interpreter_is_asked_for_its_own_packages():
    seen = []

    def has(python: str, package: str) -> bool:
        seen.append((python, package))
        return package in ("liger_kernel", "unsloth")

    call = asked("--liger", "liger/python", "--unsloth", "unsloth/python", device="cuda")
    found = {
        side.name.split(",")[0]: side.python for side in peer_sides.sides(call, 512, has=has, say=lambda text: None)
    }
    assert found["HF + Liger"] == "liger/python"
    assert found["Unsloth"] == "unsloth/python"
    assert {("liger/python", "liger_kernel"), ("unsloth/python", "unsloth"), ("liger/python", "flash_attn")} <= set(
        seen
    )


def test_sides_that_have_flags_of_their_own_carry_them():
    found = {
        side.name.partition(",")[0]: side.settings
        for side in peer_sides.sides(
            asked("--size", "1b", "--league", "equal", device="cuda"), 512, has=lambda *_: True, say=lambda text: None
        )
    }
    flags = {
        name: {flag for flag in ("liger", "compiled", "flattened") if one.get(flag)} for name, one in found.items()
    }
    assert flags == {
        "surefoot": set(),
        "HF + PEFT": set(),
        "HF + Liger": {"liger"},
        "Unsloth": set(),
        "HF + PEFT compiled": {"compiled"},
        "HF + PEFT + FlashAttention": {"flattened"},
        "HF + Liger + FlashAttention": {"liger", "flattened"},
    }


def test_nothing_is_compiled_for_lengths_that_change_or_for_8_b():
    for words in (["--size", "1b", "--league", "tuned"], ["--size", "8b", "--league", "equal"]):
        assert not [name for name in names(asked(*words, device="cuda")) if "compiled" in name]


@pytest.mark.parametrize("batch", [8, 24, 40, 56])
@pytest.mark.parametrize("longest", [1, 100, 700, 5000, 100_000])
def test_a_step_has_whole_micro_batches_on_a_gpu(batch, longest):
    found = micros(asked("--size", "1b", "--batch", str(batch), device="cuda"), longest)
    assert found
    assert all(batch % micro == 0 for micro in found)


def test_twin_more_tokens_make_smaller_micro_batches():
    call = asked("--size", "8b", "--batch", "32", device="cuda")
    assert set(micros(call, 2048)) == {4, 8}
    assert set(micros(call, 4096)) == {2, 4}


def test_a_micro_batch_that_is_asked_for_holds_for_all():
    call = asked("--micro", "2", device="cuda")
    assert set(micros(call)) == {2}
    own = peer_sides.sides(call, 512, has=lambda *_: True, say=lambda text: None)[0]
    assert own.settings["overrides"] == ["batch.micro=2"]


def test_unsloth_trains_adapters_alone():
    said: list[str] = []
    assert "Unsloth" not in " ".join(names(asked("--adapter", "full", device="cuda"), say=said.append))
    assert said == ["Unsloth is left out: its kernels are for adapters"]


def test_the_plain_path_of_a_large_model_keeps_few_activations():
    large, small = (peer_sides.reference_of(size).settings["overrides"] for size in ("8b", "small"))
    assert set(large) - set(small) == {"gradient_checkpointing=on", "batch.micro=1"}
    assert "precision=fp32" in small


def test_a_package_is_looked_for_in_the_interpreter_that_is_named():
    import sys

    assert peer_sides.has(sys.executable, "peft")
    assert not peer_sides.has(sys.executable, "no_such_package_of_anybody")
