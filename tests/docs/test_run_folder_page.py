"""docs/run-folder.md against the code and against a run: nothing is missing, nothing is invented."""

import json
import re

import pytest
import yaml

from helpers.doc_pages import ROOT, names, table
from helpers.fork_server import ForkServer
from helpers.tiny_models import tiny_llama
from surefoot.config.resume_policy import POLICIES
from surefoot.data.batching.order import split
from surefoot.report.trainer_log import PROFILED, TIMING_FIELDS
from surefoot.system.errors import NOT_REPRODUCED_EXIT_CODE, STOPPED_EXIT_CODE, SurefootError

PAGE = ROOT / "docs" / "run-folder.md"
OF_EXPERTS = {"aux_loss", "expert_busiest", "experts_idle"}
# Of rows that a short sound fp32 run of a dense model does not write.
RARE_FIELDS = {"non_finite", "skipped", "scale", PROFILED, *OF_EXPERTS}
# Of full fine-tuning, of a mixture of experts, of samples and of trackers, which are not asked for.
NOT_OF_THIS_RUN = {
    "model.safetensors",
    "config.json",
    "expert_load.json",
    "qat.json",
    "quantised/",
    "answers.jsonl",
    "turns-RANK.jsonl",
    "teacher-RANK.jsonl",
    "samples.jsonl",
    "logs.json",
    "training_reward.png",
    "tensorboard/",
    "wandb/",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The run folder of a short LoRA run with evaluation."""
    folder = tmp_path_factory.mktemp("run-folder-page")
    rows = [{"instruction": f"Say sky {n} times.", "input": "", "output": "sky " * n} for n in range(1, 9)]
    (folder / "alpaca.json").write_text(json.dumps(rows))
    config = {
        "stage": "sft",
        "model": str(tiny_llama(folder / "base")),
        "adapter": {"kind": "lora", "rank": 2},
        "data": {"train": str(folder / "alpaca.json"), "eval": 2},
        "batch": {"size": 4},
        "duration": "2 steps",
        "eval_every": "1 step",
        "output": str(folder / "run"),
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    with ForkServer() as server:
        log = folder / "log.txt"
        assert server.run(["train", str(folder / "run.yaml")], log) == 0, log.read_text()
    return folder / "run"


def listed(*columns: str) -> set[str]:
    """What the first column of a table of the page names."""
    return {name for row in table(PAGE, *columns) for name in names(row[0])}


def test_the_resume_table_is_the_policy():
    rows = [(names(key)[0], policy, why) for key, policy, why in table(PAGE, "key", "change", "why")]
    assert rows == [(key, *rule) for key, rule in POLICIES.items()]


def test_the_log_fields_are_those_of_a_log(finished):
    rows = [json.loads(line) for line in (finished / "trainer_log.jsonl").read_text().splitlines()]
    written = {field for row in rows for field in row}
    assert listed("field", "meaning") == written | RARE_FIELDS
    assert written >= TIMING_FIELDS - {PROFILED}


def test_the_examples_of_a_step_are_those_that_are_computed(finished):
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    seed = yaml.safe_load((finished / "config.yaml").read_text())["seed"]
    size = json.loads((finished / "plan.json").read_text())["plan"]["batch"]["size"]["value"]
    ((rows, _),) = split([8], 2, seed)  # records that data.eval leaves
    lines = [json.loads(line) for line in (finished / "flight.jsonl").read_text().splitlines()]
    learned = {line["step"]: line["examples"] for line in lines if "loss" in line}
    assert sorted(learned) == [1, 2]

    def computed(step):
        changes = (("seed=42", f"seed={seed}"), ("step=12 - 1", f"step={step}"))
        changes += (("whole(750)", f"whole({len(rows)})"), ("batch_size=16", f"batch_size={size}"))
        source, names = block, {}
        for old, new in changes:
            assert old in source
            source = source.replace(old, new)
        exec(source, names)
        return sorted(int(row) + 1 for row in rows[names["places"]])

    for step, examples in learned.items():
        assert computed(step - 1) == sorted(examples)
    shifted = [computed(step) for step in learned]
    assert shifted != [sorted(one) for one in learned.values()]  # twin: counted from 1


def test_the_files_are_those_of_a_run_folder(finished):
    top = {path.name for path in finished.iterdir() if path.is_file()}
    inside = {path.name for path in (finished / "checkpoint-2").iterdir()}
    *rows, checkpoint = table(PAGE, "file", "what it is")
    said = {name for row in rows for name in names(row[0])}
    assert said - NOT_OF_THIS_RUN == top
    assert names(checkpoint[0]) == ["checkpoint-N/"]
    assert inside <= said | set(names(checkpoint[1]))
    assert inside >= set(names(checkpoint[1])) - NOT_OF_THIS_RUN


def test_the_step_line_looks_as_shown(finished):
    (shown,) = re.findall(r"^step 12/750 .*$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    real = re.search(r"^\S+ (step 2/2 .*)$", (finished / "run.log").read_text(encoding="utf-8"), flags=re.MULTILINE)
    shape = re.compile(r"[\d.,:]+(e-\d+)?")
    assert shape.sub("N", shown).replace("GiB", "MiB") == shape.sub("N", real[1]).replace("GiB", "MiB")


def test_the_exit_codes_are_those_of_the_program():
    said = {int(row[0]) for row in table(PAGE, "code", "meaning", "what to do")}
    errors = {kind.exit_code for kind in SurefootError.__subclasses__()}
    assert said == {0, 1, 130, STOPPED_EXIT_CODE, NOT_REPRODUCED_EXIT_CODE} | errors


def test_twin_a_table_that_lacks_a_row_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("| key | change | why |\n|---|---|---|\n| `stage` | refused | because |\n\nEnd.\n")
    assert table(page, "key", "change", "why") == [("`stage`", "refused", "because")]
    assert table(page, "key", "change", "why") != [(f"`{key}`", *rule) for key, rule in POLICIES.items()]
