"""Every way to train, as whole runs: it learns, and resumed from any checkpoint it ends with the same bytes."""

import io
import json
import shutil

import pytest

from helpers.faults import raises_fault
from helpers.growing_records import sky_workplace
from helpers.model_layouts import run_config
from helpers.tiers import representatives
from surefoot.methods.open_model import open_for_use
from surefoot.models.embeddings import embedding_noise
from surefoot.models.precision import is_quantised
from surefoot.report.console import Console
from surefoot.runs import requirements as required
from surefoot.runs.make_plan import make_plan
from surefoot.runs.run import train_run
from surefoot.system.errors import EnvironmentFault

LORA, DORA = {"kind": "lora", "rank": 64}, {"kind": "dora", "rank": 64}  # of rank 64, moments are held in 8 bits
NF4 = {"compute": "fp32", "base": "nf4"}
INT8 = {"compute": "fp32", "base": "int8"}
STEPS, CUT = 4, 2
WAYS = {
    "adamw_8bit": {"optim": {"name": "adamw_8bit", "lr": 1e-3}, "adapter": LORA},
    "adamw_8bit, full": {"optim": {"name": "adamw_8bit", "lr": 1e-3}, "adapter": None},
    "adafactor": {"optim": {"name": "adafactor", "lr": 1e-3}, "adapter": DORA},
    "sgd": {"optim": {"name": "sgd", "lr": 0.1}, "adapter": None},
    "sgd with momentum": {"optim": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "adapter": None},
    "muon": {"optim": {"name": "muon", "lr": 1e-3}, "adapter": None},
    "muon, lora": {"optim": {"name": "muon", "lr": 1e-3}, "adapter": LORA},
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
    return run_config(
        model=str(workplace / "base"),
        data={"train": str(workplace / "rows.json"), "eval": 2, "max_length": 64},
        duration=f"{STEPS} steps",
        eval_every=f"{CUT} steps",
        checkpoint={"every": "1 step", "keep": STEPS},
        batch={"size": 4, "micro": 2},
        output=str(output),
        **way,
    )


def train(config, mode):
    screen = io.StringIO()
    assert train_run(config, mode, Console(screen)) == 0
    return screen.getvalue()


def ends(folder):
    """What a finished run leaves of its numbers: weights, moments, counts."""
    last = folder / f"checkpoint-{STEPS}"
    state = json.loads((last / "state.json").read_text())
    del state["seconds"], state["beside"]
    return {path.name: path.read_bytes() for path in last.glob("*.safetensors")}, state


@pytest.mark.parametrize("name", representatives(WAYS, "muon, lora", "int8, dora, bf16", "all at once"))
def test_a_run_that_goes_on_ends_as_the_one_that_never_stopped(workplace, tmp_path, name):
    wanted = config(workplace, tmp_path / "run", **WAYS[name])
    screen = train(wanted, "new")
    assert "bitsandbytes" not in screen.replace("through bitsandbytes", "")  # none of its noise
    uninterrupted = ends(tmp_path / "run")
    assert uninterrupted[1]["step"] == STEPS
    for step in range(CUT + 1, STEPS + 1):
        shutil.rmtree(tmp_path / "run" / f"checkpoint-{step}")
    for file in ("train_results.json", "all_results.json"):
        (tmp_path / "run" / file).unlink(missing_ok=True)
    train(wanted, "resume")
    assert ends(tmp_path / "run") == uninterrupted


def losses(folder):
    rows = [json.loads(line) for line in (folder / "trainer_log.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row], [row["eval_loss"] for row in rows if "eval_loss" in row]


def test_noise_changes_training_and_not_the_evaluation_of_the_same_weights(workplace, tmp_path):
    quiet = config(workplace, tmp_path / "quiet", optim={"lr": 1e-9}, adapter=LORA)
    noisy = config(workplace, tmp_path / "noisy", optim={"lr": 1e-9, "neftune_alpha": 50.0}, adapter=LORA)
    train(quiet, "new"), train(noisy, "new")
    (train_quiet, eval_quiet), (train_noisy, eval_noisy) = losses(tmp_path / "quiet"), losses(tmp_path / "noisy")
    assert all(abs(a - b) > 1e-3 for a, b in zip(train_quiet, train_noisy, strict=True))
    assert eval_quiet == pytest.approx(eval_noisy, abs=1e-6)


def test_twin_other_draws_would_not_end_with_the_same_bytes(workplace, tmp_path, monkeypatch):
    wanted = config(workplace, tmp_path / "run", **WAYS["neftune"])
    train(wanted, "new")
    first = ends(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    monkeypatch.setattr("surefoot.models.embeddings.embedding_noise", lambda *given: -embedding_noise(*given))
    train(wanted, "new")
    assert ends(tmp_path / "run") != first


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
    train(config(workplace, tmp_path / "run", **WAYS[f"{name}, lora"]), "new")
    opened = open_for_use(str(tmp_path / "run"))
    assert any(map(is_quantised, opened.model.modules()))
    assert f"{name} and fp32 on cpu" in opened.described
    obstacle = "needs bitsandbytes, which is not installed"
    monkeypatch.setattr("surefoot.methods.open_model.bitsandbytes_obstacle", lambda kind: obstacle)
    plain = open_for_use(str(tmp_path / "run"))
    assert not any(map(is_quantised, plain.model.modules()))
    assert f"fp32 (it was trained over {name}, which {obstacle})" in plain.described
