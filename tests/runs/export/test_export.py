"""An export is the model that was trained, or nothing is published; the certificate says by how much they differ."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers import zoo, zoo_templates
from helpers.adapter_runs import a_plan, a_run
from helpers.faults import gives, raises_fault
from helpers.plans import choice
from helpers.tiers import representatives
from helpers.tiny_models import tiny_llama
from surefoot.commands.convert import convert_weights
from surefoot.families.bos_zero import BOS_FILE, bos_file, read_bos_scale
from surefoot.methods.open_model import open_for_use
from surefoot.models import merge
from surefoot.models.bos import install_bos_scaling
from surefoot.models.folder import base_fingerprint
from surefoot.models.merge import effective_weights
from surefoot.report.cards.export import check_lines
from surefoot.runs.export import certificate
from surefoot.runs.export import merge as export_merge
from surefoot.runs.export import model as export
from surefoot.runs.export.certificate import MERGED_LIMIT, RELOADED_LIMIT, merged_limit
from surefoot.runs.export.model import export_model
from surefoot.system import durable
from surefoot.training.manifest import MANIFEST, manifest

IDS = torch.tensor([[320, 5, 9, 77, 120, 33, 250, 4]])
FP32 = 1e-5  # logits of tiny models are below 10; two orders of the same sums


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("export") / "base")


@pytest.fixture(scope="module")
def finished(base, tmp_path_factory) -> Path:
    return a_run(tmp_path_factory.mktemp("export") / "run", base, a_plan("tokenizer"))


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


def scale_bos(run: Path, scale: float) -> None:
    """As if the run had trained with this factor."""
    (run / BOS_FILE).write_text(json.dumps(bos_file(scale)))
    content = json.loads((run / "plan.json").read_text())
    content["plan"]["tokenizer"]["bos_scale"]["value"] = scale
    (run / "plan.json").write_text(json.dumps(content))


def read(folder: Path) -> dict:
    return json.loads((folder / "export.json").read_text(encoding="utf-8"))


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def test_the_files_are_the_trained_model(base, run, tmp_path):
    out = tmp_path / "merged"
    export_model(str(run), out, merge=True)
    trained = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run)
    assert (logits(AutoModelForCausalLM.from_pretrained(out)) - logits(trained)).abs().max() < FP32
    own, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (base, out))
    chat = [{"role": "user", "content": "What is a heron?"}]
    assert own.apply_chat_template(chat)["input_ids"] == theirs.apply_chat_template(chat)["input_ids"]
    assert {"README.md", "Modelfile", "config.json", "generation_config.json"} <= {p.name for p in out.iterdir()}
    assert leftovers(tmp_path) == []


def test_the_certificate_tells_inputs_outputs_and_differences(base, run, tmp_path):
    out = tmp_path / "merged"
    export_model(str(run), out, merge=True, dtype="bf16")
    record = read(out)
    assert set(record["outputs"]) == {path.name for path in out.iterdir()} - {"export.json"}
    for name, file in record["outputs"].items():
        content = (out / name).read_bytes()
        assert file == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    inputs = record["inputs"]
    weights = inputs["base"]["files"]["model.safetensors"]["sha256"]
    assert weights == hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest()
    assert inputs["adapters"][0]["name"] == "run"
    assert str(tmp_path) not in (out / "export.json").read_text()
    assert record["notes"] == []
    assert record["tensors"] == {
        "count": 21,
        "parameters": sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(base).parameters()),
        "merged_layers": 14,
        "trained_in_full": [],
        "added_rows": 0,
        "bit_for_bit_after_reloading": 21,
        "largest_rounding": {"half_units_in_the_last_place": ANY, "limit": 1.0},
    }
    assert 0.9 < record["tensors"]["largest_rounding"]["half_units_in_the_last_place"] <= 1
    merged, reloaded = record["checks"]["adapter_and_merged"], record["checks"]["fp32_and_reloaded"]
    assert 0 < merged["share_of_largest_logit"] <= merged["limit"] <= MERGED_LIMIT
    trained = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run)
    with trained.disable_adapter():
        plain = logits(trained)
    assert merged["adapter_changes"] > 0.1 * (logits(trained) - plain).abs().max()  # other texts, the same size
    assert 1e-3 < reloaded["share_of_largest_logit"] <= RELOADED_LIMIT["bf16"]
    assert merged["top1_agreement"] == 1
    assert merged["positions"] == record["prompts"]["tokens"] > 100
    assert {t.dtype for t in load_file(out / "model.safetensors").values()} == {torch.bfloat16}


def test_the_same_export_gives_the_same_bytes(run, tmp_path):
    for name in ("one/model", "two/model"):
        (tmp_path / name).parent.mkdir()
        export_model(str(run), tmp_path / name, merge=True)
    for path in (tmp_path / "one/model").iterdir():
        assert path.read_bytes() == (tmp_path / "two/model" / path.name).read_bytes()


def test_shards_have_an_index_that_transformers_reads(run, tmp_path):
    one, many = tmp_path / "one", tmp_path / "many"
    export_model(str(run), one, merge=True)
    export_model(str(run), many, merge=True, max_shard_size=40_000)
    index = json.loads((many / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert torch.equal(*(logits(AutoModelForCausalLM.from_pretrained(folder)) for folder in (one, many)))


@pytest.mark.parametrize("how", representatives(["scale", "row"], "scale"))
def test_a_broken_merge_is_refused_and_leaves_nothing(run, tmp_path, monkeypatch, how):
    def broken(module):
        found = effective_weights(module)
        if how == "scale":
            return replace(found, weight=found.before + 1.05 * (found.weight - found.before))
        return replace(found, weight=found.weight.roll(1, dims=0))

    monkeypatch.setattr(merge, "effective_weights", broken)
    with raises_fault("SF-EXPORT", "merged model"):
        export_model(str(run), tmp_path / "merged", merge=True)
    assert not (tmp_path / "merged").exists()
    assert leftovers(tmp_path) == []


def test_twin_without_the_check_the_broken_merge_would_be_published(run, tmp_path, monkeypatch):
    monkeypatch.setattr(
        merge,
        "effective_weights",
        lambda module: replace(effective_weights(module), weight=effective_weights(module).before),
    )
    monkeypatch.setattr(export_merge, "require_merged", lambda agreement, limit: None)
    with raises_fault("SF-EXPORT", "exported model"):  # the second comparison is with the adapter as well
        export_model(str(run), tmp_path / "merged", merge=True)
    monkeypatch.setattr(export, "require_reloaded", lambda *given: None)
    export_model(str(run), tmp_path / "merged", merge=True)


def test_a_written_tensor_that_comes_back_otherwise_is_refused(run, tmp_path, monkeypatch):
    real = export.save_full

    def save(model, folder, size):
        real(model, folder, size)
        path = folder / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(export, "save_full", save)
    with raises_fault("SF-EXPORT", "exported model"):
        export_model(str(run), tmp_path / "merged", merge=True)
    assert not (tmp_path / "merged").exists()


def test_a_dtype_that_changes_too_much_is_refused_with_the_way_out(run, tmp_path):
    with raises_fault("SF-EXPORT", "exported model"):
        export_model(str(run), tmp_path / "merged", merge=True, dtype="bf16", threshold=1e-5)
    export_model(str(run), tmp_path / "merged", merge=True, dtype="bf16", threshold=0.9)
    assert read(tmp_path / "merged")["checks"]["fp32_and_reloaded"]["limit"] == 0.9


def test_nothing_but_an_export_is_replaced(run, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with raises_fault("SF-USE-OUTPUT", out):
            export_model(str(run), out, merge=True, overwrite=overwrite)
    (out / "thesis.txt").unlink()
    export_model(str(run), out, merge=True)
    with raises_fault("SF-USE-OUTPUT", out):
        export_model(str(run), out, merge=True)
    before = (out / "model.safetensors").read_bytes()
    with raises_fault("SF-USE-OUTPUT", run):
        export_model(str(out), run, overwrite=True)
    export_model(str(run), out, merge=True, dtype="bf16", overwrite=True)
    assert (out / "model.safetensors").read_bytes() != before


def test_a_full_disk_is_told_before_anything_is_loaded(run, tmp_path, monkeypatch):
    monkeypatch.setattr(export.hardware, "free_disk", lambda folder: 1000)
    monkeypatch.setattr(export_merge, "load_model", None)
    with raises_fault("SF-DISK-FULL", f"{tmp_path}/merged"):
        export_model(str(run), tmp_path / "merged", merge=True)


def test_room_is_wanted_for_the_gguf_file_too(base, run, tmp_path, monkeypatch):
    size = 1.5 * (base / "model.safetensors").stat().st_size
    monkeypatch.setattr(export.hardware, "free_disk", lambda folder: size)
    with raises_fault("SF-DISK-FULL", f"{tmp_path}/merged"):
        export_model(str(run), tmp_path / "merged", merge=True, gguf=True)
    export_model(str(run), tmp_path / "merged", merge=True)


def test_a_disk_that_fills_up_leaves_the_former_export(run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    export_model(str(run), out, merge=True)
    before = read(out)

    def full(path, value):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "write_json", full)
    with raises_fault("SF-DISK-FULL", out):
        export_model(str(run), out, merge=True, dtype="bf16", overwrite=True)
    assert read(out) == before
    assert leftovers(tmp_path) == []


def test_added_rows_are_part_of_the_model(base, tmp_path):
    run = a_run(tmp_path / "run", base, a_plan("tokenizer"), rows=331)
    export_model(str(run), tmp_path / "merged", merge=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert model.config.vocab_size == model.lm_head.weight.shape[0] == 331
    trained = load_file(run / "adapter_model.safetensors")["base_model.model.lm_head.weight"]
    assert torch.equal(model.lm_head.weight, trained)
    assert (
        read(tmp_path / "merged")["tensors"]["added_rows"]
        == 331 - AutoModelForCausalLM.from_pretrained(base).config.vocab_size
    )


@pytest.mark.parametrize(("packed", "bits"), representatives([("nf4", 4), ("int8", 8)], ("nf4", 4)))
def test_a_packed_base_is_merged_as_it_was_before(base, tmp_path, packed, bits):
    plan = a_plan("tokenizer")
    precision = replace(plan.precision, base=choice(packed), compute=choice("fp32"))
    run = a_run(tmp_path / "run", base, replace(plan, precision=precision))
    exported = export_model(str(run), tmp_path / "merged", merge=True)
    (note,) = exported.record["notes"]
    assert gives(note, bits)
    trained = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run)
    assert (logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")) - logits(trained)).abs().max() < FP32


def test_adapters_are_merged_in_their_order(base, run, tmp_path):
    second = a_run(tmp_path / "second", base)
    export_model(str(base), tmp_path / "merged", adapters=(str(run), str(second)), merge=True)
    model = AutoModelForCausalLM.from_pretrained(base)
    for folder in (run, second):
        model = PeftModel.from_pretrained(model, folder).merge_and_unload()
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), logits(model))
    assert list(read(tmp_path / "merged")["checks"]) == ["1: run", "2: second", "fp32_and_reloaded"]
    (tmp_path / "other").mkdir()
    same = shutil.copytree(second, tmp_path / "other" / "run")  # of one name
    exported = export_model(str(base), tmp_path / "twice", adapters=(str(run), str(same)), merge=True)
    assert list(exported.record["checks"]) == ["1: run", "2: run", "fp32_and_reloaded"]
    for number, line in enumerate(check_lines(exported.record)[:2], start=1):
        assert gives(line.partition(": ")[0], number)
        assert gives(line, "run")
    with raises_fault("SF-EXPORT", "--adapter"):
        export_model(str(base), tmp_path / "no", adapters=(str(run), str(second)))


def test_a_whole_model_is_cast_and_split(base, tmp_path):
    export_model(str(base), tmp_path / "cast", dtype="fp16", max_shard_size=40_000)
    wanted = AutoModelForCausalLM.from_pretrained(base).half().state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "cast").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    with raises_fault("SF-USE-FLAG", base):
        export_model(str(base), tmp_path / "other", merge=True)


def test_the_adapter_alone_is_what_peft_reads(base, run, tmp_path):
    scale_bos(run, 0.1)
    export_model(str(run), tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    ours = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run)
    assert torch.equal(logits(theirs), logits(ours))
    assert {"adapter_model.safetensors", "adapter_config.json", BOS_FILE, "export.json"} == {
        path.name for path in (tmp_path / "adapter").iterdir()
    } - {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert read(tmp_path / "adapter")["inputs"]["base"]["name"] == "base"


def test_prompts_of_the_users_own(run, tmp_path):
    file = tmp_path / "asked.txt"
    file.write_text("What is a heron?\n\nAnd a trout?\n")
    export_model(str(run), tmp_path / "merged", merge=True, prompts=file)
    prompts = read(tmp_path / "merged")["prompts"]
    assert gives(prompts["from"], "asked.txt")
    assert prompts["count"] == 2
    file.write_text("\n")
    with raises_fault("SF-DATA-EMPTY", file):
        export_model(str(run), tmp_path / "other", merge=True, prompts=file)


def test_a_scaled_bos_is_written_into_its_row(base, run, tmp_path):
    scale_bos(run, 0.1)
    export_model(str(run), tmp_path / "merged", merge=True)
    scaled = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run)
    plain = logits(scaled)
    install_bos_scaling(scaled, 0.1)
    found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert (found - logits(scaled)).abs().max() < FP32
    assert (found - plain).abs().max() > 100 * FP32, "the factor does something, so the test has teeth"
    assert not (tmp_path / "merged" / BOS_FILE).exists()
    assert "scaled_and_baked" in read(tmp_path / "merged")["checks"]


def test_a_scaled_bos_that_cannot_be_written_is_refused_unless_dropped(tmp_path):
    base = tiny_llama(tmp_path / "base", tied=True)
    run = a_run(tmp_path / "run", base, a_plan("tokenizer"))
    scale_bos(run, 0.1)
    with raises_fault("SF-BOS", "bos.scale") as seen:
        export_model(str(run), tmp_path / "merged", merge=True)
    assert "adapter" in seen.value.faults[0].fix
    (base / BOS_FILE).write_text(json.dumps(bos_file(0.1)))
    with raises_fault("SF-BOS", "bos.scale") as whole:
        export_model(str(base), tmp_path / "whole")
    assert "adapter" not in whole.value.faults[0].fix  # there is none
    (base / BOS_FILE).unlink()
    assert not (tmp_path / "merged").exists()
    exported = export_model(str(run), tmp_path / "merged", merge=True, drop_bos_scale=True)
    (note,) = exported.record["notes"]
    assert gives(note, 0.1)


def test_a_bos_that_is_eos_too_is_refused_before_anything_is_loaded(base, tmp_path, monkeypatch):
    run = a_run(tmp_path / "run", base, a_plan("tokenizer", stop=(321, 320)))
    scale_bos(run, 0.0)
    monkeypatch.setattr(export_merge, "load_model", None)
    with raises_fault("SF-BOS", "bos.scale"):
        export_model(str(run), tmp_path / "merged", merge=True)


def weak(run: Path, by: float) -> Path:
    """The same adapter with its B, which a_run sets to 0.1, at `by` of that."""
    path = run / "adapter_model.safetensors"
    save_file({n: t * by if "lora_B" in n else t for n, t in load_file(path).items()}, path)
    return run


@pytest.mark.parametrize("part", representatives([0.0, 0.5, 1.1], 0.5))
def test_part_of_a_weak_adapter_is_refused(run, tmp_path, monkeypatch, part):
    """Its whole effect is near the limit for strong ones, so that only what it does itself can judge."""
    weak(run, 3e-5)
    whole = export_model(str(run), tmp_path / "whole", merge=True).record["checks"]["adapter_and_merged"]
    assert 3e-5 < whole["adapter_changes_share"] < 3e-4
    assert whole["limit"] < MERGED_LIMIT / 4

    def broken(module):
        found = effective_weights(module)
        return replace(found, weight=found.before + part * (found.weight - found.before))

    monkeypatch.setattr(merge, "effective_weights", broken)
    with raises_fault("SF-EXPORT", "merged model"):
        export_model(str(run), tmp_path / "merged", merge=True)
    if part == 0.5:  # twin: the limit that looks at the model alone lets it pass
        monkeypatch.setattr(export_merge, "merged_limit", lambda effect, noise: MERGED_LIMIT)
        export_model(str(run), tmp_path / "merged", merge=True)


def test_an_adapter_that_does_less_than_rounding_is_told(run, tmp_path):
    exported = export_model(str(weak(run, 0.0)), tmp_path / "merged", merge=True)
    (note,) = exported.record["notes"]
    assert gives(note, "run")
    assert merged_limit(float("nan"), float("nan")) == 0


def test_a_cast_that_loses_more_than_the_dtype_does_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.setattr(merge, "_cast", lambda values, dtype: values.to(torch.float8_e4m3fn).to(dtype))
    with raises_fault("SF-EXPORT", "cast model"):
        export_model(str(run), tmp_path / "merged", merge=True, dtype="bf16")
    monkeypatch.setattr(export, "require_cast", lambda rounding, dtype: None)  # twin: logits alone let it pass
    export_model(str(run), tmp_path / "merged", merge=True, dtype="bf16")


def test_a_threshold_of_zero_is_zero(base, tmp_path):
    exported = export_model(str(base), tmp_path / "same", threshold=0.0)
    assert exported.record["checks"]["fp32_and_reloaded"]["limit"] == 0
    with raises_fault("SF-EXPORT", "exported model"):
        export_model(str(base), tmp_path / "other", dtype="bf16", threshold=0.0)


def test_a_factor_that_is_missing_is_refused_as_when_opened(run, tmp_path):
    scale_bos(run, 0.1)
    (run / BOS_FILE).unlink()
    for merged in (True, False):
        with raises_fault("SF-BOS", f"{run}/bos_zero_config.json"):
            export_model(str(run), tmp_path / "out", merge=merged)
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_another_tool_goes_by_the_factor_of_its_base(base, run, tmp_path):
    own = shutil.copytree(base, tmp_path / "base")
    (own / BOS_FILE).write_text(json.dumps(bos_file(0.1)))
    (run / "plan.json").unlink()
    exported = export_model(str(own), tmp_path / "merged", adapters=(str(run),), merge=True)
    assert "scaled_and_baked" in exported.record["checks"]
    opened = open_for_use(str(own), str(run))
    found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert (found - logits(opened.model)).abs().max() < FP32
    alone = export_model(str(own), tmp_path / "adapter", adapters=(str(run),))
    assert gives(alone.record["notes"][-1], 0.1)
    assert read_bos_scale(tmp_path / "adapter") == 0.1
    (own / BOS_FILE).unlink()  # twin: nothing is scaled
    exported = export_model(str(own), tmp_path / "plain", adapters=(str(run),), merge=True)
    assert "scaled_and_baked" not in exported.record["checks"]


def test_an_adapter_of_dora_s_first_code_is_written_as_peft_reads_it(base, run, tmp_path):
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(task_type="CAUSAL_LM", r=4, use_dora=True, target_modules=["q_proj", "down_proj"]),
    )
    for number, parameter in enumerate(one for one in model.parameters() if one.requires_grad):
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    model.save_pretrained(tmp_path / "new")
    convert_weights(tmp_path / "new", tmp_path / "old", to="old-dora")
    exported = export_model(str(base), tmp_path / "alone", adapters=(str(tmp_path / "old"),))
    assert [one for one in exported.cautions if gives(one, "old") and gives(one, "old-dora")]
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "alone")
    assert torch.equal(logits(theirs), logits(model))
    misread = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "old")
    assert not torch.allclose(logits(misread), logits(model), atol=1e-3), "twin: a copy would be misread"
    merged = export_model(str(base), tmp_path / "merged", adapters=(str(tmp_path / "old"),), merge=True)
    assert [one for one in merged.cautions if gives(one, "old-dora")]


@pytest.mark.parametrize("writes", [True, False])
def test_the_card_says_which_prompts_carry_a_baked_factor(tmp_path, writes):
    """Phi-3's tokenizer begins no text with BOS; Llama's does."""
    base = zoo.ZOO["llama3" if writes else "phi3"](tmp_path / "base")
    (base / BOS_FILE).write_text(json.dumps(bos_file(0.1)))
    if not writes:
        (base / "chat_template.jinja").write_text("{{ bos_token }}" + zoo_templates.PHI3.lstrip())
    exported = export_model(str(base), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    (note,) = exported.record["notes"]
    assert note in card
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("hi")["input_ids"]
    assert (ids[0] == tokenizer.bos_token_id) is writes
    assert gives(note, tokenizer.bos_token) is not writes  # what to put before a text oneself
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], return_dict=False)
    assert chat[0] == tokenizer.bos_token_id


def test_twin_a_nan_is_within_no_limit():
    assert not certificate._within(float("nan"), 1.0)
    assert certificate._within(0.0, 1e-4)


def told_of_the_base(run: Path, other: Path, out: Path, **how) -> list[int]:
    """In how many cautions, notes of export.json, and lines of the card another base is named."""
    folder = {path.name: path for path in run.iterdir()}
    durable.write_json(run / MANIFEST, manifest(run, list(folder.values()), 3, {"base": base_fingerprint(run.parent)}))
    found = export_model(str(other), out, adapters=[str(run)], **how)
    card = (out / "README.md").read_text().splitlines() if (out / "README.md").is_file() else []
    named = [note for note in read(out)["notes"] if gives(note, run.name) and gives(note, other.name)]
    return [sum(line.removeprefix("- ") in named for line in lines) for lines in (found.cautions, named, card)]


@pytest.fixture
def over_its_parent(base, run) -> Path:
    """A run that was trained over the model in the folder above it."""
    shutil.copytree(base, run.parent, dirs_exist_ok=True)
    return run


def test_another_base_is_in_the_card_and_the_certificate(over_its_parent, tmp_path):
    other = tiny_llama(tmp_path / "other", seed=7)
    assert told_of_the_base(over_its_parent, other, tmp_path / "merged", merge=True) == [1, 1, 1]
    assert str(tmp_path) not in (tmp_path / "merged" / "README.md").read_text()
    assert told_of_the_base(over_its_parent, other, tmp_path / "alone") == [1, 1, 0]


def test_twin_its_own_base_is_not_named(over_its_parent, tmp_path):
    own = over_its_parent.parent
    assert told_of_the_base(over_its_parent, own, tmp_path / "merged", merge=True) == [0, 0, 0]


def test_every_adapter_of_several_is_looked_at(over_its_parent, base, tmp_path):
    """Not the last one alone: the first has other weights below it."""
    run, stranger = over_its_parent, a_run(tmp_path / "stranger", base)
    other = tiny_llama(tmp_path / "other", seed=7)
    durable.write_json(run / MANIFEST, manifest(run, [], 3, {"base": base_fingerprint(base)}))
    found = export_model(str(other), tmp_path / "both", adapters=[str(run), str(stranger)], merge=True)
    assert [gives(one, "run") for one in read(tmp_path / "both")["notes"] if gives(one, "other")] == [True]
    assert sum(gives(one, "other") for one in found.cautions) == 1


@pytest.mark.parametrize(
    ("trained_with", "said", "begins", "notes"),
    [
        (True, None, True, 0),  # byte-level: Ollama puts none
        (True, False, True, 0),
        (True, True, False, 0),  # twice would be another prompt
        (False, True, False, 1),
        (False, None, False, 0),
    ],
)
def test_ollama_s_prompt_begins_as_training_did(base, tmp_path, trained_with, said, begins, notes):
    run = a_run(tmp_path / "run", base, a_plan("llama3", bos=trained_with))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, run / name)
    config = json.loads((run / "tokenizer_config.json").read_text())
    written = config | ({} if said is None else {"add_bos_token": said})
    (run / "tokenizer_config.json").write_text(json.dumps(written))
    found = export_model(str(run), tmp_path / "out", merge=True)
    modelfile = (tmp_path / "out" / "Modelfile").read_text()
    assert ('TEMPLATE """{{ "<|begin_of_text|>" }}' in modelfile) == begins
    assert modelfile.count("begin_of_text") == begins
    assert sum(one.startswith("Modelfile: ") for one in found.cautions) == notes
