"""A run folder asks as the run did: in surefoot by its plan, in transformers by the chat template that it holds."""

import json

import pytest
import yaml
from transformers import AutoTokenizer, GenerationConfig

from helpers.fork_server import ForkServer
from helpers.tiers import diagonal
from helpers.tiny_models import LLAMA3_TEMPLATE, tiny_llama
from surefoot.data.formats import Turn
from surefoot.methods.open_model import conversation_ids, open_for_use
from surefoot.runs.identity import saved_identity
from surefoot.training.checkpoint import list_checkpoints

SINGLE = [
    {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": str(n)}]} for n in range(6)
]
DIALOGUES = [{"messages": row["messages"] * 2} for row in SINGLE]
TEXTS = [{"text": f"Number {n} is a number."} for n in range(6)]
FILE = LLAMA3_TEMPLATE.replace("message['role']", "message['role'] | upper").replace(">assistant<", ">ASSISTANT<")
EDIT = "{# edited #}"
# name of the run: data, data.template, what the plan then says
RUNS = {
    "auto": (SINGLE, None, "alpaca"),
    "dialogues": (DIALOGUES, None, "vicuna"),
    "texts": (TEXTS, None, "plain"),
    "file": (DIALOGUES, "own.jinja", "own.jinja"),
    "config": (DIALOGUES, FILE, "data.template.jinja"),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    base = tiny_llama(folder / "base", chat_template=False)
    with ForkServer() as server:
        for name, (rows, template, _) in RUNS.items():
            place = folder / name
            place.mkdir()
            (place / "data.json").write_text(json.dumps(rows))
            (place / "own.jinja").write_text(FILE)
            asked = (
                {} if template is None else {"template": str(place / template) if template == "own.jinja" else template}
            )
            config = {
                "stage": "sft",
                "model": str(base),
                "adapter": {"kind": "lora", "rank": 2},
                "data": {"train": str(place / "data.json")} | asked,
                "duration": "1 step",
                "output": str(place / "run"),
            }
            (place / "run.yaml").write_text(yaml.safe_dump(config))
            assert server.run(["train", str(place / "run.yaml")], place / "log") == 0, (place / "log").read_text()
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_the_plan_names_the_template_that_trained(runs, name):
    said = json.loads((runs / name / "run" / "plan.json").read_text())["plan"]["tokenizer"]["template"]
    assert said["value"].endswith(RUNS[name][2])
    assert said["reason"]


@pytest.mark.parametrize(
    ("name", "place"), diagonal([name for name in RUNS if name != "texts"], ["run", "run/checkpoint-1"])
)
def test_surefoot_and_transformers_ask_alike(runs, name, place):
    folder = runs / name / place
    tokenizer = AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "Say 7."}]
    theirs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    opened = open_for_use(str(folder))
    assert conversation_ids(opened, [Turn("user", "Say 7.")]) == theirs
    assert theirs.count(tokenizer.bos_token_id) == 1
    stops = GenerationConfig.from_pretrained(folder).eos_token_id
    assert set(opened.template.stop_ids) == set(stops if isinstance(stops, list) else [stops])


def test_a_resumed_run_takes_a_file_from_where_it_lies_now(runs):
    place = runs / "file"
    (place / "elsewhere").mkdir()
    (place / "own.jinja").rename(place / "elsewhere" / "other.jinja")
    command = ["train", str(place / "run.yaml"), f"data.template={place}/elsewhere/other.jinja", "--resume"]
    with ForkServer() as server:
        assert server.run([*command, "duration=2 steps"], place / "log") == 0, (place / "log").read_text()
        said = json.loads((place / "run" / "plan.json").read_text())["plan"]["tokenizer"]["template"]
        assert said["value"].endswith("elsewhere/other.jinja")
        assert said["source"] == "user"
        (place / "elsewhere" / "other.jinja").write_text(FILE + EDIT)
        assert server.run([*command, "duration=3 steps"], place / "log") == 4
        assert "[SF-RESUME-CHANGED]" in (place / "log").read_text()
    (place / "elsewhere" / "other.jinja").rename(place / "own.jinja")
    (place / "own.jinja").write_text(FILE)


def test_a_file_is_kept_as_it_is_and_needed_no_longer(runs):
    kept = (runs / "file" / "run" / "chat_template.jinja").read_text()
    assert kept == FILE
    (runs / "file" / "own.jinja").unlink()
    asked = conversation_ids(open_for_use(str(runs / "file" / "run")), [Turn("user", "Say 7.")])
    assert "USER" in AutoTokenizer.from_pretrained(runs / "file" / "run").decode(asked)


def identity_of(run) -> dict:
    """Of the newest checkpoint."""
    return saved_identity(max(list_checkpoints(run), key=lambda checkpoint: checkpoint.step))


def test_jinja_in_the_config_trains_like_a_file(runs):
    assert identity_of(runs / "config" / "run")["template"] == identity_of(runs / "file" / "run")["template"]
    assert (runs / "config" / "run" / "chat_template.jinja").read_text() == FILE
    with ForkServer() as server:
        log, train = runs / "config" / "log", ["train", str(runs / "config" / "run.yaml"), "--resume"]
        assert server.run([*train, "duration=2 steps"], log) == 0, log.read_text()
        assert server.run([*train, "duration=3 steps", f"data.template={json.dumps(FILE + EDIT)}"], log) == 2
        assert "[SF-RESUME-CHANGED]" in log.read_text()


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "twin: forgotten"])
def test_texts_are_evaluated_by_one_template_before_and_after_a_resume(runs, keeps, tmp_path):
    """Dialogues evaluate a run on texts: not by the texts' template, which is what the plan says of training."""
    config = yaml.safe_load((runs / "texts" / "run.yaml").read_text())
    config["output"] = str(tmp_path / "run")
    config["data"]["eval"] = str(runs / "dialogues" / "data.json")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    train = ["train", str(tmp_path / "run.yaml")]
    with ForkServer() as server:
        assert server.run(train, tmp_path / "log") == 0, (tmp_path / "log").read_text()
        saved = json.loads((tmp_path / "run" / "plan.json").read_text())
        assert saved["plan"]["tokenizer"]["template"]["value"] == "plain"
        assert saved["plan"]["tokenizer"]["dialogues"] == "alpaca"
        first = identity_of(tmp_path / "run")
        if not keeps:
            saved["plan"]["tokenizer"]["dialogues"] = ""
            (tmp_path / "run" / "plan.json").write_text(json.dumps(saved))
        assert server.run([*train, "--resume", "duration=2 steps"], tmp_path / "log") == 0
    second = identity_of(tmp_path / "run")
    assert (first["eval_template"] == second["eval_template"]) is keeps
    assert first["template"] == second["template"]


def test_a_run_on_texts_has_no_chat_template(runs):
    folder = runs / "texts" / "run"
    assert not (folder / "chat_template.jinja").exists()
    assert "apply_chat_template" not in (folder / "README.md").read_text()
    assert "apply_chat_template" in (runs / "auto" / "run" / "README.md").read_text()


def test_the_card_says_where_an_input_goes(runs):
    assert "`input`" in (runs / "auto" / "run" / "README.md").read_text()
    assert "`input`" not in (runs / "dialogues" / "run" / "README.md").read_text()


def test_twin_without_the_saved_template_transformers_cannot_ask(runs, tmp_path):
    for path in (runs / "dialogues" / "run").iterdir():
        if path.is_file() and path.name != "chat_template.jinja":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match="chat_template"):
        AutoTokenizer.from_pretrained(tmp_path).apply_chat_template([{"role": "user", "content": "a"}])
