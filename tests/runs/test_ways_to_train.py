"""Every way to train, as whole runs: it learns, and resumed from any checkpoint it ends with the same bytes."""

import json
import shutil

import pytest

from helpers.faults import gives, raises_fault
from helpers.growing_records import sky_workplace
from helpers.path_runs import ends, forget, losses, path_config, start
from helpers.tiers import representatives
from helpers.zoo_modern import MODERN
from surefoot.methods.open_model import open_for_use
from surefoot.models.embeddings import embedding_noise
from surefoot.models.precision import is_quantized
from surefoot.report.events import SAMPLES
from surefoot.runs import requirements as required
from surefoot.runs.make_plan import make_plan
from surefoot.system.errors import EnvironmentFault

LORA, DORA = {"kind": "lora", "rank": 64}, {"kind": "dora", "rank": 64}  # of rank 64, moments are held in 8 bits
REST = LORA | {"modules_to_save": "rest"}
NF4 = {"compute": "fp32", "base": "nf4"}
INT8 = {"compute": "fp32", "base": "int8"}
STEPS, CUT = 4, 2
WAYS = {
    "adamw_8bit": {"optim": {"name": "adamw_8bit", "lr": 1e-3}, "adapter": LORA},
    "adamw_8bit, full": {"optim": {"name": "adamw_8bit", "lr": 1e-3}, "adapter": None},
    "adafactor": {"optim": {"name": "adafactor", "lr": 1e-3}, "adapter": DORA},
    "rmsprop": {"optim": {"name": "rmsprop", "lr": 1e-3, "momentum": 0.5}, "adapter": LORA},
    "sgd": {"optim": {"name": "sgd", "lr": 0.1}, "adapter": None},
    "sgd with momentum": {"optim": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "adapter": None},
    "muon": {"optim": {"name": "muon", "lr": 1e-3}, "adapter": None},
    "muon, lora": {"optim": {"name": "muon", "lr": 1e-3}, "adapter": LORA},
    "two rates": {
        "optim": {"lr": 1e-3, "rates": [{"of": "lora_B", "lr": 1e-2}, {"of": "lm_head", "lr": 1e-4}]},
        "adapter": REST,
    },
    "nf4, lora": {"optim": {"lr": 1e-3}, "adapter": LORA, "precision": NF4},
    "nf4, dora, bf16": {
        "optim": {"lr": 1e-3},
        "adapter": DORA | {"dropout": 0.1},
        "precision": {"compute": "bf16", "base": "nf4"},
    },
    "int8, lora": {"optim": {"lr": 1e-3}, "adapter": LORA, "precision": INT8},
    "int8, dora, bf16": {
        "optim": {"lr": 1e-3},
        "adapter": DORA | {"dropout": 0.1},
        "precision": {"compute": "bf16", "base": "int8"},
    },
    "neftune": {"optim": {"lr": 1e-3, "neftune_alpha": 5.0}, "adapter": LORA},
    "all at once": {
        "optim": {"name": "adamw_8bit", "lr": 1e-3, "neftune_alpha": 5.0},
        "adapter": LORA | {"dropout": 0.1},
        "precision": NF4,
        "gradient_checkpointing": "on",
    },
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    return sky_workplace(tmp_path_factory, 12, hidden=64)


def config(workplace, output, **way):
    times = {
        "duration": f"{STEPS} steps",
        "eval_every": f"{CUT} steps",
        "checkpoint": {"every": "1 step", "keep": STEPS},
    }
    return path_config(workplace, output, data={"eval": 2}, **({"adapter": {"kind": "lora", "rank": 16}} | times | way))


@pytest.mark.parametrize(
    "name", representatives(WAYS, "muon, lora", "rmsprop", "two rates", "int8, dora, bf16", "all at once")
)
def test_a_run_that_goes_on_ends_as_the_one_that_never_stopped(workplace, tmp_path, name):
    wanted = config(workplace, tmp_path / "run", **WAYS[name])
    screen = start(wanted)
    assert "bitsandbytes" not in screen.replace("through bitsandbytes", "")  # none of its noise
    uninterrupted = ends(tmp_path / "run", STEPS)
    assert uninterrupted[1]["step"] == STEPS
    forget(tmp_path / "run", range(CUT + 1, STEPS + 1))
    start(wanted, "resume")
    assert ends(tmp_path / "run", STEPS) == uninterrupted


def test_noise_changes_training_and_not_the_evaluation_of_the_same_weights(workplace, tmp_path):
    quiet = config(workplace, tmp_path / "quiet", optim={"lr": 1e-9}, adapter=LORA)
    noisy = config(workplace, tmp_path / "noisy", optim={"lr": 1e-9, "neftune_alpha": 50.0}, adapter=LORA)
    start(quiet), start(noisy)
    quiet_losses, noisy_losses = losses(tmp_path / "quiet"), losses(tmp_path / "noisy")
    assert all(abs(a - b) > 1e-3 for a, b in zip(quiet_losses[:STEPS], noisy_losses[:STEPS], strict=True))
    assert quiet_losses[STEPS:] == pytest.approx(noisy_losses[STEPS:], abs=1e-6)


def test_twin_other_draws_would_not_end_with_the_same_bytes(workplace, tmp_path, monkeypatch):
    wanted = config(workplace, tmp_path / "run", **WAYS["neftune"])
    start(wanted)
    first = ends(tmp_path / "run", STEPS)
    shutil.rmtree(tmp_path / "run")
    monkeypatch.setattr("surefoot.models.embeddings.embedding_noise", lambda *given: -embedding_noise(*given))
    start(wanted)
    assert ends(tmp_path / "run", STEPS) != first


@pytest.mark.parametrize(
    ("way", "key"),
    [
        ({"optim": {"name": "adamw_8bit"}}, "optim.name"),
        ({"precision": {"base": "nf4"}}, "precision.base"),
        ({"precision": {"base": "int8"}}, "precision.base"),
    ],
)
def test_a_library_that_is_missing_ends_the_plan(workplace, tmp_path, monkeypatch, way, key):
    monkeypatch.setattr(required, "bitsandbytes_obstacle", lambda kind: "needs bitsandbytes, which is not installed")
    with pytest.raises(EnvironmentFault) as caught:
        make_plan(config(workplace, tmp_path / "run", **way))
    (fault,) = caught.value.faults
    assert (fault.where, caught.value.exit_code) == (key, 3)
    assert "surefoot[quant]" in fault.fix
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    assert make_plan(config(workplace, tmp_path / "run", **way))  # twin: where it works, nothing is refused


def test_a_compiler_that_is_missing_ends_the_plan(workplace, tmp_path, monkeypatch):
    monkeypatch.setattr(required, "compiler_obstacle", lambda kind: "needs a compiler that works")
    with pytest.raises(EnvironmentFault) as caught:
        make_plan(config(workplace, tmp_path / "run", compile="default"))
    assert [fault.where for fault in caught.value.faults] == ["compile"]


def test_a_module_that_trains_in_full_is_not_packed(workplace, tmp_path):
    with raises_fault("SF-CONFIG-CONFLICT", "adapter.modules_to_save"):
        make_plan(
            config(
                workplace,
                tmp_path / "run",
                precision=NF4,
                adapter=LORA | {"targets": ["q_proj"], "modules_to_save": ["up_proj"]},
            )
        )
    assert make_plan(
        config(workplace, tmp_path / "run", precision=NF4, adapter=LORA | {"modules_to_save": ["lm_head"]})
    )


@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_what_trained_over_few_bits_is_opened_over_few_bits_or_says_why_not(workplace, tmp_path, monkeypatch, name):
    start(config(workplace, tmp_path / "run", **WAYS[f"{name}, lora"]))
    opened = open_for_use(str(tmp_path / "run"))
    assert any(map(is_quantized, opened.model.modules()))
    assert opened.held.split()[0] == name
    obstacle = "bitsandbytes"
    monkeypatch.setattr("surefoot.methods.open_model.bitsandbytes_obstacle", lambda kind: obstacle)
    plain = open_for_use(str(tmp_path / "run"))
    assert not any(map(is_quantized, plain.model.modules()))
    assert plain.held.split()[0] == "fp32"
    assert all(gives(plain.described, one) for one in (name, obstacle))


def test_a_model_whose_config_has_no_limit_of_positions_answers_at_an_evaluation(workplace, tmp_path):
    MODERN["mamba"](workplace / "mamba")
    chosen = {"base": "mamba", "adapter": None, "samples": {"count": 1, "max_new_tokens": 2}}
    start(path_config(workplace, tmp_path / "run", data={"eval": 2}, eval_every="1 steps", **chosen))
    lines = [json.loads(line) for line in (tmp_path / "run" / SAMPLES).read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
