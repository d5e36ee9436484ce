"""What the first record of the data decides, whatever the size and the kind of the file, and whatever tool asks."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest

from helpers.model_layouts import run_config
from helpers.tiny_models import tiny_llama
from surefoot.commands.translate import reading_options
from surefoot.config.load import check_config
from surefoot.data.sources.records import records_of
from surefoot.data.sources.resolve import SourceSpec, first_record
from surefoot.interop.deepspeed_chat import FOLDERS
from surefoot.interop.registry import translate_command
from surefoot.methods import sources
from surefoot.methods.examples import prepare_examples
from surefoot.methods.sources import settled
from surefoot.runs.load_models import planned_tokenizer
from surefoot.runs.make_plan import make_plan
from surefoot.system.errors import InputError

MIB = 2**20
TURN = [{"role": "user", "content": "Where is Bergen?"}]
RECORDS = {
    "pairs": {"prompt": "Q: Where?\nA:", "completion": " In Norway."},
    "completions": {"prompt": TURN, "completion": [{"role": "assistant", "content": "In Norway."}]},
    "text": {"text": "Bergen is a town in Norway."},
    "messages": {"messages": [*TURN, {"role": "assistant", "content": "In Norway."}]},
    "dialogues": {"prompt": "\n\nHuman: Where?\n\nAssistant:", "chosen": " In Norway.", "rejected": " In Peru."},
    "plain": {"prompt": "Where?", "chosen": "In Norway.", "rejected": "In Peru."},
}
# By hand, from TRL's and DeepSpeed-Chat's own ways with records.
SAID = {
    ("sft", "pairs"): ("raw", "completion"),
    ("sft", "completions"): ("tokenizer", "completion"),
    ("sft", "text"): ("raw", "everything"),
    ("sft", "messages"): ("tokenizer", "everything"),
    ("dpo", "dialogues"): ("human-assistant", None),
    ("reward", "plain"): ("raw", None),
    ("ppo", "dialogues"): ("human-assistant", None),
}


def write(path, record, count):
    """`count` records like this one in the format of the file's name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record] * count), path)
    elif path.suffix == ".jsonl":
        path.write_text(f"{json.dumps(record)}\n" * count, encoding="utf-8")
    else:
        path.write_text(json.dumps([record] * count), encoding="utf-8")
    return str(path)


def sizes(record):
    """Numbers of records in 0.8 MB and in 2.5 MB."""
    return [int(million * 1e6 / (len(json.dumps(record)) + 2)) for million in (0.8, 2.5)]


@pytest.mark.parametrize("end", [".json", ".jsonl", ".parquet"])
@pytest.mark.parametrize(("stage", "name"), SAID)
def test_the_first_record_decides_whatever_the_size(stage, name, end, tmp_path):
    template, learned = SAID[stage, name]
    for count in sizes(RECORDS[name]):
        path = write(tmp_path / f"{count}{end}", RECORDS[name], count)
        open_ones = {"template": "by-record"} | ({"train_on": "by-record"} if learned else {})
        data = settled(run_config(stage=stage, data={"train": path, **open_ones})).data
        assert (data.template, data.train_on) == (template, learned or "responses")


def test_twin_records_of_another_kind_ask_for_something_else(tmp_path, monkeypatch):
    path = write(tmp_path / "d.json", RECORDS["pairs"], 2)
    asked = run_config(data={"train": path, "template": "by-record", "train_on": "by-record"})
    monkeypatch.setattr(sources, "first_record", lambda spec: RECORDS["messages"])
    assert settled(asked).data.template == "tokenizer"


def test_one_run_has_one_template(tmp_path):
    paths = [write(tmp_path / f"{name}.json", RECORDS[name], 1) for name in ("pairs", "messages")]
    with pytest.raises(InputError) as caught:
        settled(run_config(data={"train": paths, "template": "by-record"}))
    assert caught.value.faults[0].where == "data.train"


class Counted:
    """A file that counts what is read of it."""

    def __init__(self, file):
        self.file, self.read_bytes = file, 0

    def read(self, size=-1):
        data = self.file.read(size)
        self.read_bytes += len(data)
        return data


@pytest.mark.parametrize("end", [".json", ".jsonl", ".csv"])
def test_no_more_is_read_than_the_first_record_takes(end, tmp_path):
    long = {"prompt": "x" * 200_000, "completion": "é"}
    text = {".json": json.dumps([long] * 40), ".jsonl": f"{json.dumps(long)}\n" * 40,
            ".csv": "prompt,completion\n" + f"{long['prompt']},é\n" * 40}[end]  # fmt: skip
    path = tmp_path / f"d{end}"
    path.write_text(text, encoding="utf-8")
    with path.open("rb") as file:
        counted = Counted(file)
        _, value = next(records_of(str(path), end, counted, path.stat().st_size))
    assert value == long
    assert counted.read_bytes < MIB < path.stat().st_size


def test_a_file_without_records_is_told_by_its_name(tmp_path):
    path = tmp_path / "d.json"
    path.write_text("[]")
    with pytest.raises(InputError) as caught:
        first_record(SourceSpec(str(path)))
    assert caught.value.faults[0].where == str(path)


TRL = "trl sft --model_name_or_path {base} --output_dir o --dataset_name {path} --max_length 256"


@pytest.fixture
def examples(tmp_path, monkeypatch):
    """The ids and masks that a command's run would learn: what it reads is a function of the records alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base = tiny_llama(tmp_path / "base", pad=True)

    def found(words, path):
        command = words.format(base=base, path=path).split()
        given = dict(translate_command(command, reading_options()).config)
        config = settled(check_config({**given, "model": str(base)}))
        tokens = make_plan(config, measure=False).tokenizer
        train = prepare_examples(config, tokens, planned_tokenizer(base, tokens)).train
        return {(tuple(one.ids.tolist()), tuple(one.supervised.tolist())) for one in (train[0], train[len(train) - 1])}

    return found


@pytest.mark.parametrize("end", [".json", ".jsonl", ".parquet"])
def test_a_trl_command_learns_the_same_of_a_large_file(end, examples, tmp_path):
    record = RECORDS["pairs"] | {"source": "x" * 3000}  # few records make a large file
    small, large = (write(tmp_path / f"{count}{end}", record, count) for count in sizes(record))
    few = examples(TRL, small)
    assert examples(TRL, large) == few
    ((_, mask),) = few
    assert 0 < sum(mask) < len(mask) / 2  # the completion alone
    assert examples(TRL, write(tmp_path / f"texts{end}", RECORDS["text"], 2)) != few


@pytest.mark.parametrize("step", ["sft", "reward"])
def test_deepspeed_chat_evaluates_on_the_folders_own_file_whatever_its_size(step, tmp_path):
    record = RECORDS["dialogues"]
    for count in (2, sizes(record)[1]):
        folder = tmp_path / str(count)
        for name in ("train", "eval"):
            write(folder / f"{name}.json", record, count)
        command = f"{FOLDERS[step]}/main.py --model_name_or_path m --data_path {folder} --data_split 1,1,1"
        data = translate_command(command.split(), reading_options()).config["data"]
        assert (data["train"]["path"], data["eval"]["path"]) == (f"{folder}/train.json", f"{folder}/eval.json")
        wanted = {"format": "prompt-completion", "columns": {"completion": "chosen"}} if step == "sft" else {}
        assert {key: data["train"][key] for key in wanted} == wanted
    unseen = f"{FOLDERS[step]}/main.py --model_name_or_path m --data_path {tmp_path / 'none'} --data_split 1,1,1"
    assert translate_command(unseen.split(), reading_options()).config["data"]["eval"] == 0.1
