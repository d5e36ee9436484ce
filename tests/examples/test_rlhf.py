"""The three steps of RLHF and the short way, as one script, on small models of two families."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from helpers import zoo
from helpers.tiers import representatives

SCRIPT = Path(__file__).parents[2] / "examples" / "rlhf.sh"
SHARED = Path(__file__).parents[3] / "shared" / "data" / "preference"
OWN = [
    {"prompt": f"\n\nHuman: Count to {n}.\n\nAssistant:", "chosen": " " + "sky " * n, "rejected": " no" * (n % 4 + 1)}
    for n in range(1, 25)
]
SMALL = ["duration=2 steps", "eval_every=2 steps", "precision=fp32", "data.max_length=300", "data.max_samples=24"]
SMALL += ["adapter.rank=4", "adapter.alpha=8", "batch.size=4"]


@pytest.fixture(scope="module", params=representatives(["llama3", "opt"], "llama3"))
def walked(request, tmp_path_factory, served):
    """The folder that the script leaves, over the real pairs where they lie beside this checkout. `said` in it is what
    it printed."""
    folder = tmp_path_factory.mktemp("rlhf")
    getattr(zoo, request.param)(folder / "base", max_position_embeddings=640)
    train, evaluation = folder / "train.json", folder / "eval.json"
    if SHARED.is_dir():
        train.write_bytes((SHARED / "train.json").read_bytes())
        evaluation.write_bytes((SHARED / "eval.json").read_bytes())
    else:
        train.write_text(json.dumps(OWN[:18]), encoding="utf-8")
        evaluation.write_text(json.dumps(OWN[18:]), encoding="utf-8")
    done = subprocess.run(
        ["bash", str(SCRIPT), "base", str(train), str(evaluation), "out", *SMALL],
        cwd=folder,
        env=served.environment | {"ANSWER": "16"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (folder / "out" / "said").write_text(done.stdout, encoding="utf-8")
    return folder / "out"


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "trainer_log.jsonl").read_text(encoding="utf-8").splitlines()]


def test_every_step_leaves_a_finished_run(walked):
    for name in ("sft", "reward", "ppo", "dpo"):
        assert (walked / name / "MANIFEST.json").is_file(), name
        assert all(row["loss"] is not None for row in rows(walked / name) if "loss" in row)


def test_the_first_step_leaves_a_whole_model_for_the_others(walked):
    assert (walked / "sft" / "model.safetensors").is_file()
    assert not (walked / "sft" / "adapter_config.json").exists()
    assert (walked / "reward" / "value_head.safetensors").is_file()
    plan = json.loads((walked / "ppo" / "plan.json").read_text(encoding="utf-8"))["plan"]
    assert "trunk" in json.dumps(plan["ppo"])


def test_what_the_steps_begin_with(walked):
    """A reward model and DPO begin at ln 2; PPO's policy begins as its reference."""
    said = (walked / "said").read_text(encoding="utf-8")
    assert re.search(r"of \d+ pairs", said)  # which the reward model is measured on
    assert re.search(r"KL \S+ per token .*\bratio (1\.0000|0\.9999)", said)
    first = next(row for row in rows(walked / "reward") if "loss" in row)
    assert first["loss"] == pytest.approx(0.6931, abs=1e-4)
    start = next(row for row in rows(walked / "dpo") if "eval_loss" in row)
    assert start["eval_loss"] == pytest.approx(0.6931, abs=1e-4)
