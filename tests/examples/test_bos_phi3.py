"""The walk through the BOS experiment: the script runs as a whole, and the data behind its pictures is what it says.

Every claim is a function that raises where it does not hold; the twins show that it does raise.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from helpers import zoo
from surefoot.evaluate.capture import compare_folders

SCRIPT = Path(__file__).parents[2] / "examples" / "bos_phi3.sh"
SHARED = Path(__file__).parents[3] / "shared" / "data" / "instruct" / "alpaca_en_demo.json"
OWN = [
    {"instruction": f"Say sky {n} times.", "input": "Only that." if n % 3 else "", "output": "sky " * (1 + n % 7)}
    for n in range(60)
]
SCALE = 0.1
EXACT = 1e-6  # relative; one product in fp32
SAME_LOSS = 1e-6  # relative; the run's own evaluation and the command's batch the examples alike


@pytest.fixture(scope="module")
def walked(tmp_path_factory, served):
    """The folder that the script leaves, over alpaca_en_demo.json where it is beside this checkout, else over records
    of our own. `said` in it is what it printed."""
    folder = tmp_path_factory.mktemp("walk")
    sizes = {"max_position_embeddings": 1024, "original_max_position_embeddings": 1024, "sliding_window": 1023}
    zoo.phi3(folder / "phi3", **sizes)
    (folder / "own.json").write_text(json.dumps(OWN))
    data = SHARED if SHARED.is_file() else folder / "own.json"
    settings = ["duration=3 steps", "precision=fp32", "data.max_length=192", "batch.micro=8"]
    done = subprocess.run(
        ["bash", str(SCRIPT), "phi3", str(data), "out", *settings],
        cwd=folder,
        env=served.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (folder / "out" / "said").write_text(done.stdout)
    return folder / "out"


def norm_ratio(out: Path, run: str) -> float:
    """Of the first position into layer 0: adapter over base, as norm_by_position.png draws them."""
    results = read(out / f"norms-{run}" / "norms.json")["results"]
    return results["adapter"]["norm_by_position"][0][0] / results["base"]["norm_by_position"][0][0]


def check_ratios(out: Path) -> None:
    # the table of positions is written to six digits
    assert norm_ratio(out, "baseline") == 1
    assert norm_ratio(out, "scaled") == pytest.approx(SCALE, rel=1e-5)
    for run in ("baseline", "scaled"):
        results = read(out / f"norms-{run}" / "norms.json")["results"]
        sides = [results[side]["layers"][0]["residual_in"] for side in ("base", "adapter")]
        assert sides[0]["rest_norm"] == sides[1]["rest_norm"]


def check_capture_ratio(out: Path) -> None:
    """The same in the merged models, as norms.png of both draws it."""
    streams = {
        run: load_file(out / "captures" / run / "layer-00000.safetensors")["model.layers.0.residual_in"]
        for run in ("baseline", "scaled")
    }
    first = {run: float(stream[0].double().norm()) for run, stream in streams.items()}
    assert first["scaled"] / first["baseline"] == pytest.approx(SCALE, rel=EXACT)
    assert streams["scaled"][1:].equal(streams["baseline"][1:])


def check_comparison(out: Path) -> None:
    """comparison.png: into layer 0 only the first position differs, by 1 - SCALE; every trained matrix differs."""
    rows = {row["name"]: row for row in read(out / "captures" / "scaled" / "comparison.json")["tensors"]}
    before = rows["model.layers.0.residual_in"]
    assert before["first"] == pytest.approx(1 - SCALE, rel=EXACT)
    assert before["rest"] == 0
    weights = {name: row for name, row in rows.items() if row["kind"] == "weight"}
    trained = {name for name in weights if "norm" not in name}
    assert trained
    assert all(weights[name]["relative"] > 0 for name in trained)
    assert all(row["equal"] for name, row in weights.items() if name not in trained)
    assert rows["model.norm.output"]["relative"] > 0


def check_losses(out: Path) -> None:
    bases = []
    for run in ("baseline", "scaled"):
        measured = read(out / f"loss-{run}" / "loss.json")["results"]
        own = read(out / run / "eval_results.json")
        assert measured["adapter"]["loss"] == pytest.approx(own["eval_loss"], rel=SAME_LOSS)
        assert measured["adapter"]["supervised_tokens"] == own["eval_tokens"]
        assert measured["adapter"]["loss"] < measured["base"]["loss"]
        bases.append(measured["base"]["loss"])
    assert bases[0] == bases[1]


def check_certificates(out: Path) -> None:
    for run, names in {
        "baseline": {"adapter_and_merged", "fp32_and_reloaded"},
        "scaled": {"adapter_and_merged", "scaled_and_baked", "fp32_and_reloaded"},
    }.items():
        checks = read(out / f"merged-{run}" / "export.json")["checks"]
        assert checks.keys() == names
        for found in checks.values():
            assert found["share_of_largest_logit"] <= found["limit"] < 1
            assert found["positions"] > 0


def check_baked(out: Path) -> None:
    """The factor is in the row of BOS and nowhere else."""
    name = "model.embed_tokens.weight"
    rows = {run: load_file(out / f"merged-{run}" / "model.safetensors")[name] for run in ("baseline", "scaled")}
    bos = read(out / "merged-scaled" / "config.json")["bos_token_id"]
    assert rows["scaled"][bos].equal(rows["baseline"][bos] * SCALE)
    others = [row for row in range(len(rows["scaled"])) if row != bos]
    assert rows["scaled"][others].equal(rows["baseline"][others])


def read(path: Path):
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", [check_ratios, check_capture_ratio, check_comparison, check_losses, check_certificates, check_baked]
)
def test_what_the_walk_promises(walked, check):
    check(walked)


@pytest.mark.slow
def test_every_picture_of_the_page_is_there(walked):
    pictures = sorted(str(path.relative_to(walked)) for path in walked.glob("**/*.png"))
    assert {Path(one).parent.name for one in pictures} >= {"baseline", "scaled", "norms-baseline", "norms-scaled"}
    assert "captures/scaled/comparison.png" in pictures
    assert "norms-scaled/norm_by_position.png" in pictures
    for run in ("baseline", "scaled"):  # of training and of evaluation data
        assert (walked / run / "run.log").read_text().count("BOS       <s>, exactly once") == 2


@pytest.mark.slow
def test_a_model_against_itself_does_not_differ(walked, tmp_path):
    itself = walked / "captures" / "baseline"
    found = compare_folders(itself, itself, tmp_path / "none")
    assert all(one.equal and not one.relative for one in found.differences)


@pytest.fixture
def broken(walked, tmp_path):
    """A copy of the small files, to be broken."""
    ignored = shutil.ignore_patterns("checkpoint-*", "*.png", "*.html")
    return Path(shutil.copytree(walked, tmp_path / "out", ignore=ignored))


def change(path: Path, *keys, by: float) -> None:
    """Multiply one number of a JSON file."""
    content = read(path)
    place = content
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] *= by
    path.write_text(json.dumps(content))


def swap(a: Path, b: Path) -> None:
    a.rename(a.with_name("moved"))
    b.rename(a)
    a.with_name("moved").rename(b)


def forget_scale(out: Path) -> None:
    """As if the scaled run had been measured without its scale."""
    change(out / "norms-scaled" / "norms.json", "results", "adapter", "norm_by_position", 0, 0, by=1 / SCALE)


def unscaled_capture(out: Path) -> None:
    file = "layer-00000.safetensors"
    shutil.copy(out / "captures" / "baseline" / file, out / "captures" / "scaled" / file)


def compared_with_itself(out: Path) -> None:
    itself = out / "captures" / "baseline"
    shutil.rmtree(out / "captures" / "scaled")
    compare_folders(itself, itself, out / "captures" / "scaled")


def swapped_runs(out: Path) -> None:
    swap(out / "loss-baseline" / "loss.json", out / "loss-scaled" / "loss.json")


def above_the_limit(out: Path) -> None:
    file = out / "merged-scaled" / "export.json"
    limit = read(file)["checks"]["scaled_and_baked"]["limit"]
    share = read(file)["checks"]["scaled_and_baked"]["share_of_largest_logit"]
    change(file, "checks", "scaled_and_baked", "share_of_largest_logit", by=2 * limit / share)


def not_baked(out: Path) -> None:
    file, name = "model.safetensors", "model.embed_tokens.weight"
    tensors = load_file(out / "merged-scaled" / file)
    save_file(tensors | {name: load_file(out / "merged-baseline" / file)[name]}, out / "merged-scaled" / file)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "fault"),
    [
        (check_ratios, forget_scale),
        (check_capture_ratio, unscaled_capture),
        (check_comparison, compared_with_itself),
        (check_losses, swapped_runs),
        (check_certificates, above_the_limit),
        (check_baked, not_baked),
    ],
)
def test_twins_each_promise_can_be_broken(broken, check, fault):
    fault(broken)
    with pytest.raises(AssertionError):
        check(broken)


def test_the_script_stops_at_the_first_command_that_fails(tmp_path):
    """With no `surefoot` but one that fails, nothing after the first call runs."""
    (tmp_path / "own.json").write_text(json.dumps(OWN))
    (tmp_path / "surefoot").write_text("#!/bin/sh\necho called >> calls; exit 2\n")
    (tmp_path / "surefoot").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    arguments = ["bash", str(SCRIPT), "phi3", "own.json", "out"]
    done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == 2
    assert (tmp_path / "calls").read_text() == "called\n"
    assert len(json.loads((tmp_path / "out" / "heldout.json").read_text())) == len(OWN) // 10
