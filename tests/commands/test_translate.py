"""`surefoot translate`, `surefoot run` and a file of another tool given to `surefoot train`."""

import json
import shutil

import pytest
import yaml
from click.testing import CliRunner

from helpers import zoo
from helpers.faults import lines_giving, prints_fault
from surefoot.commands.main import main
from surefoot.config.load import load_config
from surefoot.config.yaml_reader import read_yaml

ROWS = [{"instruction": f"Say sky {n} times.", "input": "", "output": "sky " * n} for n in range(1, 13)]


@pytest.fixture(scope="module")
def phi(tmp_path_factory):
    return zoo.phi3(tmp_path_factory.mktemp("models") / "phi3")


@pytest.fixture
def words(tmp_path, phi):
    """LLaMA-Factory's settings of a run of a second."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "sky.json").write_text(json.dumps(ROWS))
    (folder / "dataset_info.json").write_text(json.dumps({"sky": {"file_name": "sky.json"}}))
    return {
        "model_name_or_path": str(phi),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
        "lora_rank": 4,
        "dataset_dir": str(folder),
        "dataset": "sky",
        "template": "phi",
        "val_size": 0.25,
        "eval_strategy": "epoch",
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "warmup_ratio": 0.3,
        "output_dir": str(tmp_path / "out"),
        "hub_token": "hf_verysecretword",
    }


@pytest.fixture
def written(tmp_path, words):
    def write(**changes):
        path = tmp_path / "theirs.yaml"
        path.write_text(yaml.safe_dump(words | changes, sort_keys=False))
        return path

    return write


def command(words: dict[str, object]) -> list[str]:
    found = ["llamafactory-cli", "train"]
    for key, value in words.items():
        found += [f"--{key}"] if value is True else [f"--{key}", str(value)]
    return found


def translate(*arguments: str):
    return CliRunner().invoke(main, ["translate", *arguments])


def test_the_printed_config_loads_and_says_where_each_line_came_from(written, tmp_path):
    result = translate(str(path := written()))
    assert result.exit_code == 0, result.output
    ours = tmp_path / "ours.yaml"
    ours.write_text(result.stdout)
    config = load_config(ours).config
    assert (config.batch.size, config.batch.micro, str(config.duration)) == (4, 2, "4 steps")
    assert f"# lora_rank: 4 ({path}:5)" in result.stdout
    assert "# assumed: disable_gradient_checkpointing: false" in result.stdout
    assert "hub_token: …" in result.stdout
    assert "verysecret" not in result.stdout


def test_out_writes_a_file_and_never_over_one(written, tmp_path):
    ours = tmp_path / "ours.yaml"
    assert translate(str(written()), "--out", str(ours)).exit_code == 0
    assert load_config(ours).config.output == str(tmp_path / "out")
    before = ours.read_text()
    result = translate(str(written()), "--out", str(ours))
    assert (result.exit_code, "exists" in result.stderr) == (2, True)
    assert ours.read_text() == before


def test_a_command_behind_dashes_and_as_json(words):
    result = translate("--json", "--", "WANDB_PROJECT=demo", *command(words))
    found = json.loads(result.stdout)
    assert (found["tool"], found["command"], found["arguments"]) == ("LLaMA-Factory", "train", ["--resume"])
    assert found["config"]["adapter"]["rank"] == 4
    assert found["environment"] == {"WANDB_PROJECT": "demo"}
    assert {note["fate"] for note in found["notes"]} == {"carried", "assumed", "listed"}


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (["nothing.yaml"], ["nothing.yaml:", "[SF-CONFIG-FILE]"]),
        (["--", "ls", "-l"], ["ls:", "[SF-TRANSLATE-COMMAND]"]),
        (
            ["--", "llamafactory-cli", "train", "--lora_rnk", "8"],
            ["--lora_rnk:", "lora_rank", "[SF-TRANSLATE-SETTING]"],
        ),
        (["--", "llamafactory-cli", "eval"], ["evaluate", "[SF-TRANSLATE-COMMAND]"]),
        (
            ["--", "torchrun", "--nproc_per_node", "4", "llamafactory-cli", "train"],
            ["dataset:", "[SF-TRANSLATE-SETTING]"],
        ),
    ],
)
def test_wrong_words_end_in_one_line_each(arguments, values):
    result = translate(*arguments)
    assert result.exit_code == 2
    assert lines_giving(result.stderr, *values)
    assert "Traceback" not in result.stderr


def test_translate_refuses_the_values_that_run_refuses_and_no_absent_file():
    words = ["--", "finetune.py", "--base_model=org/m", "--data_path=nowhere.json"]
    assert translate(*words).exit_code == 0
    odd = ["--lora_dropout=7", "--learning_rate=-1", "--cutoff_len=0"]
    result = translate(*words, *odd)
    assert result.exit_code == 2
    ran = CliRunner().invoke(main, ["run", *words, *odd])
    assert ran.exit_code == 2
    for name in ("--lora_dropout", "--learning_rate", "--cutoff_len"):
        (line,) = [line for line in result.stderr.splitlines() if f"error: {name}: " in line]
        assert line in ran.stderr


def test_keys_of_our_own_stand_before_the_dashes():
    command = ["--", "LOG=1", "finetune.py", "--base_model=org/m", "--learning_rate=1e-4", "--bf16"]

    def found(*own):
        return json.loads(translate("--json", *own, *command).stdout)

    plain, other = found(), found("optim.lr=2e-5", "log_every=1", "data.eval=none")
    assert (other["config"]["optim"]["lr"], other["config"]["log_every"]) == (2e-5, 1)
    assert (other["environment"], plain["config"]["optim"]["lr"]) == ({"LOG": "1"}, 1e-4)
    told = {note["word"]: (note["fate"], note["keys"]) for note in other["notes"]}
    assert told["optim.lr=2e-5"] == ("carried", ["optim.lr"])
    assert told["--learning_rate 1e-4"] == ("listed", [])
    assert [note["word"] for note in other["notes"] if "log_every" in note["keys"]] == ["log_every=1"]
    for own, said in (("log_evry=1", "log_every"), ("optim.lr=x", "optim.lr=x"), ("nothing", "key=value")):
        for name in ("translate", "run"):
            result = CliRunner().invoke(main, [name, own, *command])
            assert (result.exit_code, said in result.stderr, own in result.stderr) == (2, True, True)
    exported = CliRunner().invoke(main, ["run", "log_every=1", "--", "llamafactory-cli", "export", "x.yaml"])
    assert exported.exit_code == 2


def test_a_file_of_ours_is_no_file_of_another_tool(tmp_path):
    (tmp_path / "ours.yaml").write_text("stage: sft\nmodel: m\n")
    result = translate(str(tmp_path / "ours.yaml"))
    assert result.exit_code == 2
    assert prints_fault(result.stderr, "SF-TRANSLATE-COMMAND", tmp_path / "ours.yaml")


def test_what_is_wrong_with_a_value_is_shown_at_the_word(written, tmp_path):
    path = written(model_name_or_path=str(tmp_path / "no-such-model"))
    result = CliRunner().invoke(main, ["train", str(path)])
    assert result.exit_code == 2
    assert lines_giving(result.stderr, f"{path}:1:1:", "model_name_or_path:", "[SF-FILE-MISSING]")


def test_train_recognizes_the_file(server, written, tmp_path):
    path, log, output = written(), tmp_path / "log.txt", tmp_path / "out"
    assert server.run(["train", str(path)], log, None) == 0, log.read_text()
    said = log.read_text()
    assert f"surefoot translate {path}" in said.partition("\n")[0]
    for line in ("training example:", "label_ids:", "Training completed successfully!"):
        assert f"\n{line}\n" in said
    rows = [json.loads(line) for line in (output / "trainer_log.jsonl").read_text().splitlines()]
    first = next(row for row in rows if "loss" in row)
    measured = f"'loss': {round(first['loss'], 4)}, 'grad_norm': {round(first['grad_norm'], 4)}"
    assert f"\n{{{measured}, 'learning_rate': 0.0, 'epoch': 0.33}}\n" in said
    own = f"1/{first['total_steps']}"  # in surefoot's line of the step, which run.log has
    assert lines_giving(said, own) == []
    assert lines_giving((output / "run.log").read_text(), own)
    evaluation = next(row for row in rows if "eval_loss" in row)
    accuracy = f"'eval_accuracy': {round(evaluation['eval_accuracy'], 4)}"
    assert f"{{'eval_loss': {round(evaluation['eval_loss'], 4)}, {accuracy}, 'epoch': 1.0}}" in said
    assert "eval_accuracy" in json.loads((output / "eval_results.json").read_text())
    kept = (output / "training_args.json").read_text()
    assert json.loads(kept)["given"]["lora_rank"] == 4
    assert "verysecret" not in kept
    assert "BOS" not in said.partition("training example:")[2]  # nothing is scaled, so nothing says so


def test_run_and_the_printed_config_train_the_same(server, written, words, tmp_path):
    """Bit for bit, and the words stay in the folder when the run goes on."""
    ours, log = tmp_path / "ours.yaml", tmp_path / "log.txt"
    ours.write_text(translate("--", *command(words)).stdout)
    assert server.run(["run", "--", *command(words)], log, None) == 0, log.read_text()
    theirs = tmp_path / "theirs"
    shutil.move(tmp_path / "out", theirs)
    assert server.run(["train", str(ours)], log, None) == 0, log.read_text()
    plain = tmp_path / "out"
    assert read_yaml(theirs / "config.yaml").data == read_yaml(plain / "config.yaml").data
    weights = "adapter_model.safetensors"
    assert (theirs / weights).read_bytes() == (plain / weights).read_bytes()
    assert not (plain / "training_args.json").exists()
    # It goes on, from a plain config.
    kept = (theirs / "training_args.json").read_bytes()
    shutil.rmtree(plain)
    shutil.move(theirs, plain)
    assert server.run(["train", str(ours), "duration=6 steps", "--resume"], log, None) == 0, log.read_text()
    assert (plain / "training_args.json").read_bytes() == kept
    assert server.run(["verify", str(plain)], log, None) == 0, log.read_text()
    # Twin: another word, other weights.
    before = (plain / weights).read_bytes()
    changed = command(words | {"lora_alpha": 4, "max_steps": 6})
    assert server.run(["run", "--overwrite", "--", *changed], log, None) == 0, log.read_text()
    assert (plain / weights).read_bytes() != before


def test_a_scaled_bos_is_said_and_written(server, written, tmp_path):
    path, log, output = written(use_bos_zero_training=True), tmp_path / "log.txt", tmp_path / "out"
    assert server.run(["train", str(path)], log, None) == 0, log.read_text()
    said = log.read_text()
    for line in (
        "🎯 BOSZeroTrainer initialized",
        "   - BOS tokens will be added to sequences",
        "   - Position 0 embeddings will be scaled by 0.1",
        "✅ Found embedding layer: base_model.model.model.embed_tokens",
        "✅ BOS zeroing hook registered on embedding layer",
        f"💾 BOS zeroing configuration saved to {output}/bos_zero_config.json",
    ):
        assert f"\n{line}\n" in said
    assert (output / "bos_zero_config.json").is_file()
    resumed = tmp_path / "resumed.txt"
    before = {path: path.read_bytes() for path in output.rglob("*.*")}
    assert server.run(["train", str(path)], resumed, None) == 0  # LLaMA-Factory goes on where it was; this run is done
    assert {path: path.read_bytes() for path in output.rglob("*.*")} == before


def test_dry_run_of_a_command(server, words, tmp_path):
    log = tmp_path / "log.txt"
    assert server.run(["run", "--dry-run", "--", *command(words)], log, None) == 0
    assert lines_giving(log.read_text(), 4, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_layers_of_a_hub_model_are_those_of_its_cached_config(tmp_path, written, monkeypatch):
    config = written(model_name_or_path="org/m", finetuning_type="freeze")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    away = CliRunner().invoke(main, ["translate", str(config), "--json"])
    snapshot = tmp_path / "hub" / "models--org--m" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"num_hidden_layers": 7}')
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    there = CliRunner().invoke(main, ["translate", str(config), "--json"])
    assert (away.exit_code, there.exit_code) == (0, 0), there.output
    assert json.loads(away.output)["config"]["model"]["trained"] == [r".*\.(last 2)(\..*)?"]
    assert json.loads(there.output)["config"]["model"]["trained"] == [r".*\.(5|6)(\..*)?"]


def of_initial(written, folder):
    """What is said about an adapter to go on with, without its name."""
    found = CliRunner().invoke(main, ["translate", str(written(adapter_name_or_path=folder))])
    assert found.exit_code == 2
    return found.output.replace(folder, "").replace("^" * len(folder), "")


def test_a_folder_that_is_not_here_may_have_a_name_that_the_hub_forbids(written):
    assert of_initial(written, "saves/run--1") == of_initial(written, "saves/run-01")


def test_twin_what_the_hubs_library_says_of_the_name_is_no_answer(written, monkeypatch):
    monkeypatch.setattr("huggingface_hub.errors.HFValidationError", KeyError)
    assert of_initial(written, "saves/run--1") != of_initial(written, "saves/run-01")
