"""Training starts from a saved adapter (`adapter.initial`) exactly, and only from one of the same shape."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from helpers.adapter_runs import a_run
from helpers.faults import prints_fault
from helpers.trained_runs import heron_config, heron_folder, heron_train, heron_trained
from surefoot.commands.main import main
from surefoot.config import load
from surefoot.config.dump import plain_config
from surefoot.config.load import check_config, load_config
from surefoot.config.resume_policy import diff_configs
from surefoot.config.saved_shape import with_saved_shape, with_shape_of_then
from surefoot.config.schema import AdapterConfig
from surefoot.methods import policy
from surefoot.models import saved_adapter
from surefoot.models.save import ADAPTER_WEIGHTS
from surefoot.runs.make_plan import make_plan
from surefoot.system.errors import InputError

STILL = {"lr": 1e-12, "weight_decay": 0.0}  # a step that moves no weight by more than MOVED
MOVED = 1e-9


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = heron_folder(tmp_path_factory.mktemp("initial"))
    a_run(folder / "saved", folder / "base")
    return folder


def adapter_of(world, **changes):
    saved = json.loads((world / "saved/adapter_config.json").read_text())
    shape = {
        "kind": "lora",
        "rank": saved["r"],
        "alpha": saved["lora_alpha"],
        "targets": sorted(saved["target_modules"]),
    }
    return {**shape, "initial": str(world / "saved"), **changes}


def check_start(world, name):
    heron_trained(world, name, duration="1 steps", optim=STILL, adapter=adapter_of(world))
    before, after = (load_file(world / folder / ADAPTER_WEIGHTS) for folder in ("saved", name))
    assert before.keys() == after.keys()
    assert all(torch.allclose(after[key], before[key], rtol=0, atol=MOVED) for key in before)


def test_the_first_step_starts_from_the_saved_weights(world):
    check_start(world, "one")


def test_twin_a_new_adapter_has_other_weights(world, monkeypatch):
    monkeypatch.setattr(policy, "start_from", lambda model, saved: None)
    with pytest.raises(AssertionError):
        check_start(world, "two")


def check_left_out(world, name):
    left_out = {"initial": str(world / "saved"), "dropout": 0.5}
    loaded = load_config(heron_config(world, name, adapter=left_out))
    assert loaded.config.adapter == AdapterConfig(**adapter_of(world, dropout=0.5))
    assert loaded.config.adapter == check_config(loaded.given | {"adapter": left_out}).adapter
    plan = make_plan(loaded.config).adapter
    assert plan is not None
    assert (plan.kind.source, plan.targets.source) == ("user", "user")
    assert all("adapter.initial" in choice.reason for choice in (plan.kind, plan.targets))


def test_keys_that_are_left_out_are_those_of_the_saved_adapter(world):
    check_left_out(world, "left-out")


def test_twin_without_them_kind_is_required(world, monkeypatch):
    monkeypatch.setattr(load, "with_saved_shape", lambda data: data)
    with pytest.raises(InputError) as caught:
        check_left_out(world, "left-out-twin")
    assert [fault.code for fault in caught.value.faults] == ["SF-CONFIG-KEY"]


def test_what_cannot_be_read_leaves_kind_required(world):
    for text in ("", "[]", '{"r": 1e999, "lora_alpha": 1, "target_modules": ["q_proj"]}', "[" * 100_000):
        (world / "odd").mkdir(exist_ok=True)
        (world / "odd/adapter_config.json").write_text(text)
        with pytest.raises(InputError) as caught:
            load_config(heron_config(world, "odd-shape", adapter={"initial": str(world / "odd")}))
        assert [fault.code for fault in caught.value.faults] == ["SF-CONFIG-KEY"]


def test_experts_are_not_named_in_targets(world):
    saved = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}
    (world / "experts").mkdir()
    (world / "experts/adapter_config.json").write_text(json.dumps(saved))
    found = with_saved_shape({"adapter": {"initial": str(world / "experts")}})["adapter"]
    assert (found["rank"], "targets" in found) == (2, False)


def check_differences(world):
    adapter = adapter_of(world, rank=3, alpha=1, rslora=True, targets=["q_proj"])
    with pytest.raises(InputError) as caught:
        make_plan(load_config(heron_config(world, "differences", adapter=adapter)).config)
    files = [world / "saved" / name for name in ("adapter_config.json", ADAPTER_WEIGHTS)]
    assert [fault.where for fault in caught.value.faults] == [*[str(files[0])] * 3, str(files[1])]


def test_all_differences_are_told_at_once(world):
    check_differences(world)


def test_twin_other_modules_are_one_of_them(world, monkeypatch):
    monkeypatch.setattr(saved_adapter, "_other_modules", lambda *arguments, **options: [])
    with pytest.raises(AssertionError):
        check_differences(world)


@pytest.mark.parametrize(("changes", "value"), [({"alpha": 1}, 1), ({"rslora": True}, True), ({"kind": "dora"}, True)])
def test_another_scale_or_kind_is_refused(world, changes, value):
    result = heron_train(world, "three", duration="1 steps", adapter=adapter_of(world, **changes))
    assert result.exit_code == 2
    assert prints_fault(result.output, "SF-ADAPTER-FIT", world / "saved/adapter_config.json", value)


def test_other_modules_are_refused(world):
    result = heron_train(world, "four", duration="1 steps", adapter=adapter_of(world, targets=["q_proj"]))
    assert result.exit_code == 2
    assert prints_fault(result.output, "SF-ADAPTER-FIT", world / "saved" / ADAPTER_WEIGHTS)


def copied(world, name, tensors=None, **settings):
    """The saved adapter with other settings or tensors, as `adapter.initial`."""
    shutil.copytree(world / "saved", world / name)
    file = world / name / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    if tensors is not None:
        save_file(tensors, world / name / ADAPTER_WEIGHTS)
    return adapter_of(world, initial=str(world / name))


@pytest.mark.parametrize("pattern", ["alpha_pattern", "rank_pattern"])
def test_a_module_with_a_rank_or_scale_of_its_own_is_refused(world, pattern):
    """alpha_pattern is not seen in the tensors: the run would go on at another scale."""
    adapter = copied(world, pattern, **{pattern: {"q_proj": 3}})
    result = heron_train(world, "five", duration="1 steps", adapter=adapter)
    assert result.exit_code == 2
    assert prints_fault(result.output, "SF-ADAPTER-FIT", world / pattern / "adapter_config.json", pattern, 3)


def test_a_pattern_that_changes_nothing_is_none(world):
    alpha = json.loads((world / "saved/adapter_config.json").read_text())["lora_alpha"]
    heron_trained(world, "six", "--dry-run", adapter=copied(world, "same", alpha_pattern={"q_proj": alpha}))


def with_one_matrix(world, name):
    """The adapter as of a tool that fuses q, k and v: one A, and the rows of the three B one below the other."""
    tensors = load_file(world / "saved" / ADAPTER_WEIGHTS)
    for first in [key for key in tensors if ".q_proj." in key]:
        parts = [tensors.pop(first.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        tensors[first.replace("q_proj", "qkv_proj")] = parts[0] if ".lora_A." in first else torch.cat(parts)
    targets = json.loads((world / "saved/adapter_config.json").read_text())["target_modules"]
    kept = [target for target in targets if target not in ("q_proj", "k_proj", "v_proj")]
    return copied(world, name, tensors, target_modules=[*kept, "qkv_proj"])


def check_fused(world, name):
    adapter = with_one_matrix(world, f"{name}-saved")
    heron_trained(world, name, duration="1 steps", optim=STILL, adapter=adapter)
    before, after = (load_file(world / folder / ADAPTER_WEIGHTS) for folder in ("saved", name))
    assert before.keys() == after.keys()
    for key, tensor in after.items():
        # The three have the A of q.
        same = key.replace("k_proj", "q_proj").replace("v_proj", "q_proj") if ".lora_A." in key else key
        assert torch.allclose(tensor, before[same], rtol=0, atol=MOVED)


def test_an_adapter_of_another_layout_is_converted(world):
    check_fused(world, "fused")


def test_twin_without_the_conversion_it_is_refused(world, monkeypatch):
    monkeypatch.setattr(policy, "fitted", lambda saved, facts: saved)
    with pytest.raises(AssertionError):
        check_fused(world, "unfused")


COMMANDS = {"train": ["train"], "dry": ["train", "--dry-run"], "plan": ["plan"]}
REWARD = "def short(prompts, responses):\n    return [-len(one) for one in responses]\n"


def of_the_key(path):
    """The place of adapter.initial in the config."""
    lines = path.read_text().splitlines()
    (line,) = [number for number, text in enumerate(lines, 1) if text.startswith("  initial: ")]
    return f"{path}:{line}:12: error: adapter.initial"


def found_early(world, monkeypatch, path, command, *facts):
    """Refused before weights are loaded."""
    monkeypatch.setattr(policy, "load_model", lambda *arguments, **options: pytest.fail("weights are loaded"))
    result = CliRunner().invoke(main, [*COMMANDS[command], str(path)])
    assert result.exit_code == 2
    assert prints_fault(result.output, *facts)


@pytest.mark.parametrize(("command", "stage"), [("train", "sft"), ("dry", "sft"), ("plan", "sft"), ("dry", "ppo")])
def test_a_typing_error_is_found_before_weights_are_loaded(world, monkeypatch, command, stage):
    name = f"typo-{command}-{stage}"
    (world / "score.py").write_text(REWARD)
    more = {"ppo": {"reward": f"{world / 'score.py'}:short", "max_new_tokens": 4}} if stage == "ppo" else {}
    path = heron_config(world, name, stage=stage, adapter=adapter_of(world, initial=str(world / "savd")), **more)
    found_early(world, monkeypatch, path, command, "SF-FILE-MISSING", of_the_key(path), world / "saved")


def test_another_rank_is_found_before_weights_are_loaded(world, monkeypatch):
    path = heron_config(world, "early", adapter=adapter_of(world, rank=3))
    found_early(world, monkeypatch, path, "dry", "SF-ADAPTER-FIT", world / "saved/adapter_config.json", 3)


def test_tensors_of_another_shape_are_found_before_weights_are_loaded(world, monkeypatch):
    tensors = load_file(world / "saved" / ADAPTER_WEIGHTS)
    first = min(key for key in tensors if ".lora_B." in key)
    adapter = copied(world, "longer", tensors | {first: torch.cat([tensors[first]] * 2)})
    path = heron_config(world, "shape", adapter=adapter)
    found_early(world, monkeypatch, path, "dry", "SF-ADAPTER-FIT", world / "longer" / ADAPTER_WEIGHTS)


def test_twin_that_looks_only_when_it_loads_notices_nothing_in_a_dry_run(world, monkeypatch):
    monkeypatch.setattr(policy, "find_initial", lambda config, plan, base: None)
    heron_trained(world, "late", "--dry-run", adapter=adapter_of(world, rank=3))


def test_a_run_resumes_although_the_folder_is_gone(world):
    adapter = copied(world, "moved")
    heron_trained(world, "resumed", duration="2 steps", checkpoint={"every": "1 steps"}, adapter=adapter)
    shutil.rmtree(world / "moved")
    heron_trained(world, "resumed", "--resume", duration="3 steps", checkpoint={"every": "1 steps"}, adapter=adapter)


def check_earlier_run(world, then=with_shape_of_then):
    """As a run of before kept its config: with the default of targets."""
    now = plain_config(load_config(heron_config(world, "earlier", adapter={"initial": str(world / "saved")})).config)
    before = now | {"adapter": now["adapter"] | {"targets": "all-linear"}}
    assert [change.key for change in diff_configs(then(before), now)] == []


def test_a_run_of_an_earlier_version_has_the_targets_that_it_had_to_have(world):
    check_earlier_run(world)


def test_twin_its_config_as_it_stands_looks_changed(world):
    with pytest.raises(AssertionError, match=r"adapter\.targets"):
        check_earlier_run(world, then=lambda data: data)


def test_overwriting_a_run_does_not_take_its_start_away(world):
    copied(world, "itself")
    (world / "itself/plan.json").write_text('{"plan": {}}')
    result = heron_train(world, "itself", "--overwrite", adapter=adapter_of(world, initial=str(world / "itself")))
    assert result.exit_code == 2
    assert prints_fault(result.output, "SF-USE-OUTPUT", of_the_key(world / "itself.yaml"))
