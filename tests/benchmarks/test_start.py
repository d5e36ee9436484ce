"""What `surefoot train` imports before step 1: a LoRA run needs no translator, doctor, pictures or other method."""

import json
import sys

import pytest

from helpers.trained_runs import heron_config, heron_folder
from start import FIRST_LINE, STEP_1, measure
from surefoot.methods.table import functions_of

PRINTED = "surefoot.interop.tool_log"  # the empty log lines of a run of our own
ROOMS = ("surefoot.interop", "surefoot.evaluate", "surefoot.commands.doctor", "surefoot.commands.tune")
METHODS = (
    "surefoot.methods.ppo",
    "surefoot.methods.preference",
    "surefoot.methods.reference",
    "surefoot.methods.reward",
    "surefoot.methods.losses.ppo",
    "surefoot.methods.losses.preference",
    "surefoot.methods.losses.kto",
)
LIBRARIES = ("matplotlib", "datasets", "pandas", "pyarrow", "deepspeed", "lm_eval", "torchvision", "wandb", "mlflow")


def needless(modules: list[str]) -> set[str]:
    """What a supervised LoRA run on a JSON file does not need."""
    wanted = {"surefoot.interop", PRINTED}
    names = (*ROOMS, *METHODS, *LIBRARIES)
    return {one for one in modules if one not in wanted and any(f"{one}.".startswith(f"{name}.") for name in names)}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return heron_folder(tmp_path_factory.mktemp("start"))


def test_a_lora_run_imports_only_what_it_needs_before_step_1(place):
    found = measure([str(heron_config(place, "run"))])
    assert needless(found[STEP_1]["modules"]) == set()
    assert "peft" in found[STEP_1]["modules"]
    assert not {"torch", "transformers", "numpy"} & set(found[FIRST_LINE]["modules"])
    assert found[FIRST_LINE]["processor"] < found[STEP_1]["processor"]


def test_twin_what_other_methods_compute_is_imported_with_their_row():
    for method in ("ppo", "dpo", "reward"):
        functions_of(method)
    assert {*METHODS} <= needless(list(sys.modules))


def test_twin_a_config_of_another_tool_imports_the_dialects(place):
    words = {"model_name_or_path": str(place / "base"), "stage": "sft", "do_train": True, "finetuning_type": "lora"}
    words |= {"dataset": "train", "dataset_dir": str(place), "template": "llama3", "output_dir": str(place / "other")}
    (place / "other.json").write_text(json.dumps(words))
    (place / "dataset_info.json").write_text('{"train": {"file_name": "train.json"}}')
    found = measure([str(place / "other.json")], last=FIRST_LINE)
    assert "surefoot.interop.registry" in needless(found[FIRST_LINE]["modules"])
