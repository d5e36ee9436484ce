"""The scripts of compat: written where asked, nothing lost, and each word of the measuring ones finds its flag."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from helpers.faults import gives, refused_settings, setting
from surefoot.commands.main import main
from surefoot.interop import compat
from surefoot.interop.compat import write_scripts
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_command, translate_file
from surefoot.planning.parallel import shared_parts
from surefoot.report.pictures.plots import draw_history
from surefoot.system import durable
from surefoot.system.errors import EnvironmentFault, InputError

ROOT = Path(__file__).parents[3]
NAMED = (
    "finetune.py", "accelerate_config.yaml", "llama3_8B_DoRA.sh", "commonsense_evaluate.py", "llamafactory-cli",
    "examples/train_lora/phi3_bos_zero_lora.yaml", "examples/train_lora/train_phi3_bos_zero.py",
    "evaluate_rmsnorm_llamafactory.py", "capture_phi3_with_rmsnorm_weights.py", "debug_bos_zero.py",
    "llamafactory/extras/ploting.py", "simple_finetune.py", "train_sft.py", "activate",
)  # fmt: skip


def test_every_name_is_written_and_programs_can_be_started(tmp_path):
    names = write_scripts(tmp_path / "new", overwrite=False)
    assert set(NAMED) <= set(names)
    for name in names:
        there, ours = tmp_path / "new" / name, ROOT / "compat" / name
        assert there.read_text().replace(f"#!{sys.executable}", "#!/usr/bin/env python3") == ours.read_text()
        assert not there.read_text().startswith("#!/usr/bin/env python3")
        assert os.access(there, os.X_OK) == os.access(ours, os.X_OK) == there.read_bytes().startswith(b"#!")
    assert write_scripts(tmp_path / "new", overwrite=False) == names  # again: nothing differs


def test_programs_can_be_started_where_the_package_lost_their_mode(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "compat", tmp_path / "scripts")
    for path in (tmp_path / "scripts").rglob("*"):
        if path.is_file():
            path.chmod(0o644)
    monkeypatch.setattr(compat.resources, "files", lambda name: tmp_path)
    for name in write_scripts(tmp_path / "out", overwrite=False):
        there = tmp_path / "out" / name
        assert os.access(there, os.X_OK) == there.read_bytes().startswith(b"#!"), name
    monkeypatch.setattr(durable, "make_executable", lambda path: None)
    write_scripts(tmp_path / "twin", overwrite=False)
    assert not os.access(tmp_path / "twin" / "finetune.py", os.X_OK)


@pytest.mark.parametrize("place", ["python", "with blank/python", "long/" + "x" * 130 + "/python"])
def test_the_scripts_find_the_python_that_has_surefoot_wherever_it_is(tmp_path, monkeypatch, place):
    python = tmp_path / place
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f"#!/bin/sh\nexec '{sys.executable}' \"$@\"\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    write_scripts(tmp_path / "out", overwrite=False)
    monkeypatch.undo()
    script = tmp_path / "out" / "finetune.py"
    outside = {"PATH": "/usr/bin:/bin"}  # no environment is active
    done = subprocess.run([script, "--lora_r"], env=outside, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "[SF-TRANSLATE-SETTING]" in done.stderr
    compile(script.read_text(), "finetune.py", "exec")  # its first lines are Python as well as shell
    if place == "python":
        ours = str(ROOT / "compat" / "finetune.py")
        twin = subprocess.run([ours], env=outside, capture_output=True, text=True, check=False)
        assert twin.returncode in (1, 127)  # the repository's own ask for any python3, and this one has no surefoot


@pytest.fixture
def from_compat(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "compat"))
    yield
    for name in [name for name in sys.modules if name == "finetune" or name.partition(".")[0] == "llamafactory"]:
        del sys.modules[name]


def test_train_takes_its_first_arguments_by_place_and_raises_what_is_wrong(from_compat):
    from finetune import train

    assert refused_settings(lambda: train("org/model", "data.json", "out", "dora", lora_r="x")) == ["lora_r"]
    assert refused_settings(train) == ["base_model"]
    with pytest.raises(InputError) as caught:
        train("org/model", "absent.json", target_modules=["q_proj"], bf16=True)
    assert setting(caught.value.faults[0]) == "data_path"  # at the word, in the tool's own name


def test_run_exp_refuses_callbacks_and_raises_what_is_wrong(from_compat):
    from llamafactory.train.tuner import export_model, run_exp

    assert refused_settings(lambda: run_exp({"model_name_or_path": "m"}, callbacks=[object()])) == ["callbacks"]
    given = {"model_name_or_path": "m", "lora_rnk": 8}
    assert refused_settings(lambda: run_exp(given, callbacks=[])) == ["lora_rnk", "do_train", "dataset"]
    assert refused_settings(lambda: export_model({"model_name_or_path": "m"})) == ["export_dir"]


@pytest.mark.parametrize(
    ("rows", "steps"),
    [
        ([{"current_steps": 1, "loss": 1.0, "grad_norm": 2.0}], []),
        (
            [
                {"current_steps": 1, "loss": 1.0, "grad_norm": 2.0},
                {"current_steps": 2, "loss": None, "grad_norm": None},
            ],
            [2],
        ),
        ([{"current_steps": 1, "loss": 1.0, "grad_norm": None}, {"current_steps": 1, "eval_loss": 1.0}], [1]),
    ],
)
def test_debug_bos_zero_looks_at_the_log(from_compat, tmp_path, rows, steps):
    from debug_bos_zero import not_finite

    (tmp_path / "trainer_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert not_finite(tmp_path) == steps


@pytest.mark.parametrize(
    ("name", "overwrite"),
    [
        ("finetune.py", False),
        ("accelerate_config.yaml", True),
        ("examples/train_lora/phi3_bos_zero_lora.yaml", True),
    ],
)
def test_no_flag_writes_over_a_file_that_surefoot_did_not_write(tmp_path, name, overwrite):
    mine = tmp_path / name
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(InputError) as caught:
        write_scripts(tmp_path, overwrite=overwrite)
    (fault,) = caught.value.faults
    assert (fault.code, fault.where) == ("SF-USE-OUTPUT", str(tmp_path))
    assert name in fault.what
    assert "--overwrite" not in fault.fix  # it would not help
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]
    assert mine.read_text() == "mine"


def test_what_another_version_wrote_is_replaced_where_asked_and_an_edited_one_is_not(tmp_path, monkeypatch):
    ours = sys.executable
    monkeypatch.setattr(sys, "executable", "/another/python3")
    write_scripts(tmp_path, overwrite=False)
    monkeypatch.setattr(sys, "executable", ours)
    with pytest.raises(InputError) as caught:
        write_scripts(tmp_path, overwrite=False)
    assert "--overwrite" in caught.value.faults[0].fix
    write_scripts(tmp_path, overwrite=True)
    assert (tmp_path / "finetune.py").read_text().startswith(f"#!{ours}\n")
    edited = (tmp_path / "train_sft.py").read_text() + "# mine\n"
    (tmp_path / "train_sft.py").write_text(edited)
    with pytest.raises(InputError):
        write_scripts(tmp_path, overwrite=True)
    assert (tmp_path / "train_sft.py").read_text() == edited


def test_twin_without_the_record_nothing_tells_whose_a_script_is(tmp_path, monkeypatch):
    monkeypatch.setattr(compat, "_recorded", lambda folder: {name: compat._digest(folder / name) for name in NAMED})
    (tmp_path / "finetune.py").write_text("mine")
    write_scripts(tmp_path, overwrite=True)
    assert (tmp_path / "finetune.py").read_text() != "mine"


@pytest.mark.parametrize("words", [(), ("--overwrite",)])
def test_a_registry_of_the_users_stays_and_stops_nothing(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    registry = tmp_path / compat.REGISTRY
    registry.parent.mkdir()
    registry.write_text('{"mine": {"file_name": "mine.json"}}')
    told = CliRunner().invoke(main, ["compat", ".", *words])
    assert told.exit_code == 0, told.output
    assert registry.read_text() == '{"mine": {"file_name": "mine.json"}}'
    (said,) = [line for line in told.stdout.splitlines() if compat.REGISTRY in line]
    assert said != compat.REGISTRY  # as of a file that was written
    assert os.access(tmp_path / "finetune.py", os.X_OK)


@pytest.mark.parametrize("shell", ["bash"])
def test_activate_finds_its_own_folder_from_anywhere(tmp_path, shell):
    write_scripts(tmp_path / "with blank", overwrite=False)
    said = subprocess.run(
        [shell, "-c", f"source '{tmp_path}/with blank/activate'; command -v llamafactory-cli; echo $PYTHONPATH"],
        cwd="/", capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]},
    ).stdout  # fmt: skip
    assert said == f"{tmp_path}/with blank/llamafactory-cli\n{tmp_path}/with blank\n"


MEASURING = {
    "commonsense_evaluate.py --dataset boolq --model LLaMA3-8B --adapter DoRA --base_model b --lora_weights=w "
    "--batch_size 2": "evaluate commonsense b --adapter w --only adapter --data . --sets boolq --mode published "
    "--model-label LLaMA3-8B --label DoRA --out experiment --batch-size 2",
    "python evaluate_rmsnorm_llamafactory.py --model_name b --adapter_path w --output_dir o --generate_samples":
    "evaluate norms b --adapter w --out o --overwrite --generate-samples",
    "evaluate_rmsnorm_llamafactory.py --model_name b": "evaluate norms b",
    "capture_phi3_with_rmsnorm_weights.py --model-id b --output-dir o":
    "capture b --out o --overwrite --seq-len 1024",
    "capture_phi3_with_rmsnorm_weights.py --model-id=b --output-dir=o --seq-len=64 --rmsnorm-weights-path x":
    "capture b --out o --overwrite --seq-len 64",
}  # fmt: skip


@pytest.mark.parametrize("command", MEASURING)
def test_the_measuring_scripts_become_words_of_ours(command):
    found = translate_command(command.split(), Options())
    words = [found.command, *found.arguments]
    assert words == MEASURING[command].split()
    group = main.get_command(None, words[0])  # and ours knows each of them
    if words[0] == "evaluate":
        group = group.get_command(None, words[1])
        words = words[1:]
    known = {option for parameter in group.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known
    assert len(found.notes) >= command.count("--")


def test_a_wrong_word_is_a_fault_at_its_flag():
    wrong = {
        "commonsense_evaluate.py --dataset bool --model m --adapter a --base_model b --lora_weights w": ["dataset"],
        "commonsense_evaluate.py --dataset boolq": ["model", "adapter", "base_model", "lora_weights"],
        "evaluate_rmsnorm_llamafactory.py --model b": ["model", "model_name"],
        "capture_phi3_with_rmsnorm_weights.py --model-id b": ["output_dir"],
        "capture_phi3_with_rmsnorm_weights.py b --output-dir o": ["b"],
    }
    for command, names in wrong.items():
        assert refused_settings(lambda: translate_command(command.split(), Options())) == names  # noqa: B023


def test_a_runs_history_is_drawn_and_what_it_lacks_is_named(tmp_path):
    rows = [{"step": step, "loss": 2.0 / step} for step in (1, 2, 3)] + [{"step": 3, "eval_loss": 1.0}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    assert draw_history(tmp_path, ["loss", "eval_loss", "reward/mean"]) == (
        ["training_loss.png"],
        ["eval_loss", "reward/mean"],
    )
    assert (tmp_path / "training_loss.png").read_bytes().startswith(b"\x89PNG")
    sys.path.insert(0, str(ROOT / "compat"))
    try:
        from llamafactory.extras.ploting import plot_loss
    finally:
        sys.path.remove(str(ROOT / "compat"))
    (tmp_path / "training_loss.png").unlink()
    plot_loss(str(tmp_path))
    assert (tmp_path / "training_loss.png").is_file()
    with pytest.raises(InputError):
        draw_history(tmp_path / "no", ["loss"])


@pytest.mark.parametrize("file", ["plan.json", "MANIFEST.json"])
def test_a_runs_folder_and_a_place_that_takes_nothing_are_refused(tmp_path, file):
    (tmp_path / file).write_text("{}")
    assert refused_settings(lambda: write_scripts(tmp_path, overwrite=True), "SF-USE-OUTPUT") == [
        str(tmp_path).replace("-", "_")
    ]
    assert [path.name for path in tmp_path.iterdir()] == [file]
    (tmp_path / file).rename(tmp_path / "notes.json")
    assert write_scripts(tmp_path, overwrite=False)  # twin
    if Path("/proc/self").is_dir():
        with pytest.raises(EnvironmentFault):
            write_scripts(Path("/proc/xx"), overwrite=False)


def ran(*command, **environment):
    words = [str(word) for word in command]
    kept = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **environment}
    return subprocess.run(words, env=kept, capture_output=True, text=True, check=False)


def test_the_launch_script_ends_with_the_error_and_has_a_help(tmp_path):
    write_scripts(tmp_path, overwrite=False)
    script = tmp_path / "llama3_8B_DoRA.sh"
    absent = ran("bash", script, 8, 16, tmp_path / "out", 0, DATA_PATH="./absent.json", BASE_MODEL="org/model")
    assert absent.returncode == 2
    assert "Traceback" not in absent.stderr
    assert "absent.json" in absent.stderr.splitlines()[-1]
    told = ran("bash", script, "--help")
    assert told.returncode == 0
    assert "DATA_PATH" in told.stdout


def test_help_of_another_tool_prints_what_becomes_of_its_flags():
    def called(*words):
        return CliRunner().invoke(main, ["run", "--", *words])

    for words in (("finetune.py", "--help"), ("accelerate", "launch", "finetune.py", "--lora_r", "8", "-h")):
        told = dict(re.findall(r"(--\w+ \[\w*\])([^[]*?)(?= --|$)", " ".join(called(*words).stdout.split())))
        assert gives(told["--lora_r [8]"], "adapter.rank")
        assert gives(told["--load_8bit [False]"], "precision.base")
        assert "." not in told["--bottleneck_size [256]"]  # becomes no key
    for program in ("train_sft.py", "commonsense_evaluate.py", "evaluate_rmsnorm_llamafactory.py"):
        assert called(program, "--help").exit_code == 0
    assert "--lora_rank [8]" in called("llamafactory-cli", "train", "--help").stdout
    config = called("trl", "sft", "--help")
    assert config.exit_code == 2
    assert "surefoot translate" in config.stderr
    twin = called("finetune.py", "--helpp")
    assert twin.exit_code == 2


def test_a_config_of_our_own_and_a_file_in_place_of_a_command(tmp_path):
    own = tmp_path / "bos.yaml"
    own.write_text("stage: sft\nmodel: org/model\ndata: {train: x.json}\noutput: runs/x\n")

    def fix(call):
        with pytest.raises(InputError) as caught:
            call()
        (fault,) = caught.value.faults
        assert fault.code == "SF-TRANSLATE-COMMAND"
        return fault.fix

    assert f"surefoot train {own}" in fix(lambda: translate_file(str(own), own.read_text(), (), Options()))
    unknown = own.read_text() + "unheard: 1\n"
    assert "surefoot train" not in fix(lambda: translate_file(str(own), unknown, (), Options()))  # twin
    assert "surefoot train t/lora_sft.yaml" in fix(lambda: translate_command(["t/lora_sft.yaml"], Options()))


@pytest.mark.parametrize("script", ["run_1.3b.sh", "run_llama_8b.sh"])
@pytest.mark.parametrize(("stages", "average"), [("", None), ("2 2", True), ("2 3", False), ("0 0", True)])
def test_step_3_asks_for_an_average_where_a_gpu_has_whole_weights(tmp_path, script, stages, average):
    """Its own defaults included, on two GPUs: the plan refuses the other."""
    shutil.copytree(ROOT / "compat" / "deepspeed_chat", tmp_path / "chat")
    (tmp_path / "chat/bin/deepspeed").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    folder = tmp_path / "chat/training/step3_rlhf_finetuning/training_scripts/single_node"
    done = subprocess.run(
        ["bash", folder / script, "a", "c", *stages.split()],
        cwd=tmp_path, env={**os.environ, "NUM_GPUS": "2"}, capture_output=True, text=True, check=True,
    )  # fmt: skip

    def shares_an_average(*more):
        words = ["deepspeed", *done.stdout.split(), *more]
        config = translate_command(words, Options(folder=str(tmp_path))).config
        parallel = config["parallel"]
        shared = "weights" in shared_parts(parallel["engine"], parallel.get("zero_stage"))
        return shared, config["ppo"].get("ema") is not None

    shared, kept = shares_an_average()
    assert kept is not shared
    assert average in (None, kept)
    assert shares_an_average("--enable_ema") == (shared, True)  # twin: the flag in the script whatever the stage
