"""Runs with precision.qat: their conversion is certified, what breaks it is noticed, and resume is exact."""

import json
import re
import shutil
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import yaml
from click.testing import CliRunner

from helpers.faults import lines_giving, raises_fault
from helpers.tiers import representatives
from helpers.trained_runs import heron_folder, heron_train, heron_trained
from surefoot.commands.doctor import numbers
from surefoot.commands.main import main
from surefoot.models.folder import read_config
from surefoot.report.conversion import agrees

pytest.importorskip("torchao", reason="make qat installs it")

QAT = {"qat": "int4", "qat_group_size": 8}
FULL = {"adapter": None, "duration": "4 steps", "optim": {"lr": 2e-3}, "checkpoint": {"every": "2 steps", "keep": 3}}
DATA = {"max_length": 128, "eval": 3}
PLAIN = {"adapter": "plain", "loss": "plain", "last_block": "plain", "pointwise": "plain"}
# Kernels and packed rows of surefoot's own, in fp32.
OWN_KERNELS = 1e-5
OTHER_SUMS = 3e-5  # of gradients over ranks; a last bit may decide to which number a weight is rounded


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return heron_folder(tmp_path_factory.mktemp("qat"))


def sections(folder, qat=QAT, **changes):
    data = {"train": str(folder / "train.json"), **DATA}
    return FULL | {"data": data, "precision": {"compute": "fp32", **qat}} | changes


@pytest.fixture(scope="module")
def run(folder):
    heron_trained(folder, "full", **sections(folder))
    return folder / "full"


def record(run):
    return json.loads((run / "qat.json").read_text())


def verify(run):
    return CliRunner().invoke(main, ["verify", str(run), "--json"])


def test_the_loss_of_the_converted_model_is_the_one_that_training_saw(run):
    found = record(run)
    assert found["trained"] == found["converted"] == found["reloaded"]
    assert abs(found["logged"] - found["trained"]) <= OWN_KERNELS * found["trained"]
    assert (found["agrees"], found["layers"], found["rows"], found["to"]) == (True, 14, "held out", "int4")
    assert verify(run).exit_code == 0
    listed = json.loads((run / "MANIFEST.json").read_text())["files"]
    assert {"qat.json", "quantised/model.safetensors", "quantised/config.json"} <= set(listed)


def test_what_is_published_is_whole_and_loads_in_plain_transformers(run):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run)
    assert getattr(model.config, "quantization_config", None) is None
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    stored = AutoModelForCausalLM.from_pretrained(run / "quantised")
    weight, whole = (one.model.layers[1].mlp.down_proj.weight for one in (stored, model))
    step = whole.detach().unflatten(1, (-1, 8)).abs().amax(-1) / 7.5
    assert ((weight.dequantize() - whole).unflatten(1, (-1, 8)).abs() <= (0.5 + 1e-4) * step[..., None] + 1e-9).all()


def test_a_conversion_in_other_groups_fails(run, monkeypatch, folder):
    """The twin: the same run, converted with another group size."""
    from surefoot.runs import convert_run

    own = convert_run.convert
    monkeypatch.setattr(convert_run, "convert", lambda model, to, group: own(model, to, 16))
    result = heron_train(folder, "twin", **sections(folder))
    assert result.exit_code == 0, result.output
    found = record(folder / "twin")
    assert found["trained"] != found["converted"]
    assert not found["agrees"]
    verified = verify(folder / "twin")
    assert verified.exit_code == 4
    assert "SF-VERIFY-DIFFERS" in verified.output


def test_a_changed_file_of_the_conversion_is_noticed(run, tmp_path):
    shutil.copytree(run, tmp_path / "copy")
    path = tmp_path / "copy" / "quantised" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert verify(tmp_path / "copy").exit_code == 4


def test_resume_is_exact(run, folder):
    heron_trained(folder, "resumed", **sections(folder))
    resumed = folder / "resumed"
    for name in ("checkpoint-4", "quantised", "MANIFEST.json", "qat.json", "model.safetensors"):
        path = resumed / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    heron_trained(folder, "resumed", "--resume", **sections(folder))
    assert CliRunner().invoke(main, ["verify", str(run), "--same-as", str(resumed)]).exit_code == 0
    assert record(resumed) == record(run)


BLOCKS = [{"qat": "nvfp4"}, {"qat": "mxfp4"}]


@pytest.mark.parametrize("qat", [{"qat": "int8"}, {"qat": "int8-int4", "qat_group_size": 32}, *BLOCKS])
def test_other_schemes_and_the_plain_kernels(folder, qat):
    """With the plain kernels the loss that was logged is the certificate's, but for packing."""
    name = qat["qat"]
    changes = {"kernels": PLAIN, "data": {"train": str(folder / "train.json"), **DATA, "packing": "off"}}
    heron_trained(folder, name, **sections(folder, qat, **changes, duration="2 steps"))
    found = record(folder / name)
    assert found["trained"] == found["converted"] == found["reloaded"]
    assert abs(found["logged"] - found["trained"]) <= 1e-6 * found["trained"]


def test_an_adapter_learns_beside_a_rounded_base(folder):
    adapter = {"kind": "lora", "rank": 4}
    heron_trained(folder, "lora", **sections(folder, adapter=adapter, duration="2 steps"))
    found = record(folder / "lora")
    assert found["trained"] == found["converted"]
    assert found["agrees"]
    assert "reloaded" not in found
    assert not (folder / "lora" / "quantised").exists()
    plan = json.loads((folder / "lora" / "plan.json").read_text())
    assert plan["plan"]["kernels"]["adapter"]["value"] == "plain"
    heron_trained(folder, "lora-plain", **sections(folder, {}, adapter=adapter, duration="2 steps"))
    assert first_loss(folder / "lora") != first_loss(folder / "lora-plain")


def test_the_code_of_the_card_opens_what_was_trained(folder, monkeypatch):
    """Of an adapter over the base, rounded alike; of all weights, the folder that the card names."""
    from surefoot.methods.open_model import open_for_use

    adapter = {"kind": "lora", "rank": 4}
    monkeypatch.chdir(folder)
    for qat in (QAT, {"qat": "int8"}, {"qat": "int8-int4", "qat_group_size": 32}, *BLOCKS):
        name = f"card-{qat['qat']}"
        heron_trained(folder, name, **sections(folder, qat, adapter=adapter, duration="2 steps"))
        code = re.search(r"```python\n(.*?)```", (folder / name / "README.md").read_text(), re.DOTALL)[1]
        code = code.replace('folder = "."', f"folder = {name!r}").partition("\nmessages")[0]
        names = {}
        exec(code, names)
        unrounded = {}
        exec(re.sub(r", quantization_config=rounding|(?m:^round_weights.*)", "", code), unrounded)
        ids = torch.arange(3, 20)[None]
        with torch.no_grad():
            ours, theirs, twin = (
                one(ids).logits for one in (open_for_use(name).model, names["model"], unrounded["model"])
            )
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours, twin)


@pytest.mark.parametrize("qat", [QAT, {"qat": "nvfp4"}])
def test_rounding_starts_after_the_steps_that_were_asked_for(folder, qat):
    """Losses of both parts, and a resume across the switch."""
    name = f"after-{qat['qat']}"
    plain, late, at_once = (f"{name}-{part}" for part in ("plain", "late", "at-once"))
    data = {"train": str(folder / "train.json"), **DATA, "packing": "off"}
    often = {"data": data, "eval_every": "2 steps"}
    heron_trained(folder, plain, **sections(folder, {}, **often))
    heron_trained(folder, at_once, **sections(folder, qat, **often))
    switched = sections(folder, qat | {"qat_after": 2}, **often)
    heron_trained(folder, late, **switched)
    found, whole, rounded = (losses(folder / part) for part in (late, plain, at_once))
    assert found[:2] == whole[:2]
    assert found[2] != whole[2]
    assert whole[0] != rounded[0]
    # The same weights, rounded where they are measured.
    assert evaluated(folder / late, 2) != evaluated(folder / plain, 2)
    certificate = record(folder / late)
    assert certificate["agrees"]
    shutil.copytree(folder / late, folder / f"{late}-again")
    for path in ("checkpoint-4", "quantised"):
        shutil.rmtree(folder / f"{late}-again" / path)
    for path in ("MANIFEST.json", "qat.json", "model.safetensors"):
        (folder / f"{late}-again" / path).unlink()
    heron_trained(folder, f"{late}-again", "--resume", **switched)
    same = ["verify", str(folder / late), "--same-as", str(folder / f"{late}-again")]
    assert CliRunner().invoke(main, same).exit_code == 0
    assert losses(folder / f"{late}-again") == found


def test_doctor_compares_without_rounding(folder, tmp_path, monkeypatch):
    """An nvfp4 input is rounded by a scale of the whole micro-batch, which is no leak between documents."""
    own = {"stage": "sft", "model": str(folder / "base"), "output": str(tmp_path / "run")}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(sections(folder, {"qat": "nvfp4"}) | own))

    def verdicts():
        result = CliRunner().invoke(main, ["doctor", str(tmp_path / "run.yaml"), "--json"])
        return {(one["code"], one["verdict"]) for one in json.loads(result.stdout)["checks"]}

    found = verdicts()
    assert {("PACK-LEAK", "ok"), ("MICRO-BATCH-SUM", "ok"), ("FAST-PATH", "ok")} <= found
    assert not [one for one in found if one[1] == "fault"]
    monkeypatch.setattr(numbers, "unrounded", lambda model: nullcontext())  # the twin
    assert ("PACK-LEAK", "fault") in verdicts()


def losses(run):
    rows = map(json.loads, (run / "trainer_log.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def evaluated(run, step):
    rows = map(json.loads, (run / "trainer_log.jsonl").read_text().splitlines())
    return next(row["eval_loss"] for row in rows if "eval_loss" in row and row["current_steps"] == step)


@pytest.mark.parametrize(
    ("to", "adapter"), representatives(product(["int4", "nvfp4", "mxfp4"], ["full", "lora"]), ("nvfp4", "full"))
)
def test_shards_are_rounded_as_whole_weights_are(folder, to, adapter):
    """Two ranks with FSDP2 beside DDP, unrounded in the first of two steps."""
    found = {}
    data = {"train": str(folder / "train.json"), **DATA, "packing": "off"}
    changes = {"adapter": {"kind": "lora", "rank": 4} if adapter == "lora" else None, "data": data, "kernels": PLAIN}
    for engine in ("ddp", "fsdp2"):
        name, ranks = f"{engine}-{to}-{adapter}", {"nproc": 2, "engine": engine}
        own = sections(folder, {"qat": to, "qat_after": 1}, **changes, duration="2 steps", parallel=ranks)
        heron_trained(folder, name, **own)
        found[engine] = losses(folder / name)
        assert record(folder / name)["agrees"]
    assert found["fsdp2"] == pytest.approx(found["ddp"], rel=OTHER_SUMS)


def test_what_was_converted_is_told(run):
    """The card, the last lines, and whoever names the folder itself."""
    assert lines_giving((run / "README.md").read_text(), "`quantised`", "int4")
    said = (run / "run.log").read_text()
    assert lines_giving(said, "quantised/")
    assert lines_giving(said, "int4", 14, f"{record(run)['reloaded']:.6g}")
    with raises_fault("SF-MODEL-QUANTISED", run / "quantised/config.json") as caught:
        read_config(run / "quantised")
    assert str(run) in caught.value.faults[0].fix
    assert "nf4" not in caught.value.faults[0].fix


def test_without_held_out_rows_the_first_step_serves(folder):
    data = {"train": str(folder / "train.json"), "max_length": 128}
    heron_trained(folder, "alone", **sections(folder, data=data, duration="1 steps"))
    found = record(folder / "alone")
    assert (found["rows"], found["logged"], found["agrees"]) == ("of step 1", None, True)


def test_the_run_opens_as_it_was_trained(run):
    """`surefoot evaluate` measures what training saw, not the whole weights."""
    from surefoot.methods.open_model import open_for_use
    from surefoot.models.qat import not_rounded

    assert not_rounded(open_for_use(str(run)).model) == []


def test_a_layer_that_does_not_round_stops_the_run(folder, monkeypatch):
    """The twin of the comparison with the plan: training over whole weights would be told before step 1."""
    from surefoot.methods import policy

    monkeypatch.setattr(policy, "round_weights", lambda model, to, group: None)
    result = heron_train(folder, "unrounded", **sections(folder))
    assert result.exit_code == 3
    assert "SF-PLAN-BROKEN" in result.output


def first_loss(run):
    return json.loads((run / "trainer_log.jsonl").read_text().splitlines()[0])["loss"]


@pytest.mark.parametrize(
    "record", [{"converted": 1.5}, {"reloaded": 1.5}, {"converted": None}, {"logged": 1.6}, {"trained": None}]
)
def test_a_certificate_with_another_loss_does_not_agree(record):
    sound = {"device": "cpu", "trained": 1.25, "converted": 1.25, "reloaded": 1.25, "logged": 1.25}
    assert agrees(sound)
    assert not agrees(sound | record)
