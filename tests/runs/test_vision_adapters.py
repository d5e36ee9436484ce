"""Adapters in vision tower and projector: beside PEFT's on the same targets, saved, merged, resumed, refused."""

import io
import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

import surefoot
from helpers.faults import raises_fault
from helpers.model_layouts import run_config
from helpers.seeing_families import seeing_family
from helpers.tiers import representatives
from helpers.wrappers import wrapper
from interop.axolotl_configs import CHAT, LORA, axolotl
from runs import test_pictures_run
from runs.test_picture_families_run import batch_of, expected
from runs.test_pictures_run import COLOURS, FP32_RELATIVE, config, examples_of, opened, records, trained_and_resumed
from runs.test_vision_parts import QWEN, made
from surefoot.data.batching.loader import Layout, example_batches
from surefoot.families.vision_parts import part_of
from surefoot.methods.losses.sft import sft_loss
from surefoot.models.adapters import add_adapter
from surefoot.models.facts import facts_of
from surefoot.planning.adapter import plan_adapter
from surefoot.planning.coverage import coverage
from surefoot.planning.notes import Notes
from surefoot.planning.optimizer import trainable_tensors
from surefoot.planning.vision import adaptable, plan_vision
from surefoot.runs.export.model import export_model

# Names of linear layers that the language model and the tower of a family share, or of the tower alone.
NAMES = {
    "mllama": ["q_proj", "v_proj", "fc1"],
    "llava": ["q_proj", "v_proj", "fc2"],
    "gemma3": ["q_proj", "out_proj"],
    "smolvlm": ["k_proj", "fc1"],
    "lfm2_vl": ["q_proj", "fc2"],
    "llama4": ["q_proj", "vision_adapter.mlp.fc1"],
    "qwen2_5_vl": ["q_proj", "qkv", "up_proj"],
    "glm46v": ["q_proj", "qkv"],
    "paddleocr_vl": ["q_proj", "fc1"],
}
EACH = representatives(list(NAMES), "mllama", "qwen2_5_vl")
TOWER = {"tower": "adapter"}
READS = r"re:model\.language_model\.layers\.1\..*_proj"  # Llama 3.2 Vision's layer that reads pictures


def peft_on(base, **how):
    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32, attn_implementation="sdpa")
    return get_peft_model(model, LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, **how)).eval()


def inputs_of(name, base, folder):
    """A batch, and transformers' own loss of a model on it."""
    if name not in QWEN:
        batch = batch_of(base, folder)
        return batch, lambda model: expected(model, name, base, folder, batch)
    (batch,) = example_batches(examples_of(base, folder), range(4), Layout(0))
    order = [list(COLOURS)[int(number) - 1] for number in batch.examples]
    return batch, lambda model: test_pictures_run.expected(model, base, folder, batch, order)


def planned(base, targets, **vision):
    asked, facts = run_config(vision=vision, adapter={"kind": "lora", "rank": 2, "alpha": 4, "targets": targets}), None
    facts = facts_of(base)
    beside = adaptable(facts, plan_vision(asked, facts, Notes()))
    return facts, plan_adapter(asked.adapter, facts, 0, Notes(), beside=beside)


@pytest.mark.parametrize("name", EACH)
def test_they_are_pefts_on_the_same_targets(tmp_path, name):
    """Modules, loss and gradients."""
    base = made(name, tmp_path / "base")
    batch, theirs_on = inputs_of(name, base, tmp_path)
    theirs = peft_on(base, target_modules=NAMES[name])
    facts, plan = planned(base, NAMES[name], **TOWER)
    ours = add_adapter(opened(base), plan, seed=1, base="org/base").eval()
    values = {key: one for key, one in theirs.state_dict().items() if "lora_" in key}
    assert values.keys() == {key for key in ours.state_dict() if "lora_" in key}
    assert {part_of(key) for key in values} == {None, "tower"}
    ours.load_state_dict(values, strict=False)
    wanted = theirs_on(theirs)
    wanted.backward()
    found = sft_loss(ours, batch).loss
    found.backward()
    assert found.item() == pytest.approx(wanted.item(), rel=FP32_RELATIVE)
    gradients = {key: one.grad for key, one in theirs.named_parameters() if one.grad is not None}
    largest = max(float(one.abs().max()) for one in gradients.values())
    own = {key: one.grad for key, one in ours.named_parameters() if one.grad is not None}
    assert own.keys() == gradients.keys()
    assert all(float((own[key] - gradients[key]).abs().max()) <= FP32_RELATIVE * largest for key in own)
    assert any(part_of(key) == "tower" and float(one.abs().max()) > 0 for key, one in own.items())
    trained = sum(one.numel() for one in ours.parameters() if one.requires_grad)
    assert plan.trainable == trained == sum(one.numbers for one in trainable_tensors(facts, plan, 0))
    rows = {row.kind: row for row in coverage(facts, plan)}
    assert rows["vision tower"].trained == sum(one.numel() for key, one in values.items() if part_of(key))
    _, twin = planned(base, NAMES[name] if name not in QWEN else ["q_proj"])  # twin: the tower stays as it is
    assert {part_of(f"{one}.weight") for one in twin.targets.value} == {None}
    assert rows["vision tower"].trained > 0 == {row.kind: row for row in coverage(facts, twin)}["vision tower"].trained


# LLaMA-Factory's names of the projector, and of what LoRA leaves out besides (ff6d4d12, model_utils/visual.py).
KEPT = {"qwen2_5_vl": ["visual.merger", "patch_embed"], "llava": ["multi_modal_projector"]}
KEPT["gemma3"] = KEPT["llava"]


@pytest.mark.parametrize("name", representatives(list(KEPT), "qwen2_5_vl"))
def test_all_linear_layers_with_the_tower_are_llamafactorys(tmp_path, name):
    """Its find_all_linear_modules and patch_target_modules, with freeze_vision_tower: false and lora_target: all."""
    base = made(name, tmp_path / "base")
    model = AutoModelForImageTextToText.from_pretrained(base)
    kinds = {own: type(module).__name__ for own, module in model.named_modules()}
    linear = [
        one for one in kinds if "Linear" in kinds[one] and not any(key in one for key in ("lm_head", *KEPT[name]))
    ]
    endings = {one.rpartition(".")[2] for one in linear}
    expected = {
        one for one in kinds if any(ending in one for ending in endings) and not any(key in one for key in KEPT[name])
    }
    _, plan = planned(base, "all-linear", **TOWER)
    assert set(plan.targets.value) == expected
    _, twin = planned(base, "all-linear")
    assert set(twin.targets.value) < expected


PADDLE = (
    r"(model\.language_model\.layers\.\d+\.(mlp\.(gate|up|down)_proj|self_attn\.(q|k|v|o)_proj)|model\.visual\.vision_model"
    r"\.encoder\.layers\.\d+\.(self_attn\.(q|k|v|out)_proj|mlp\.fc[12])|model\.projector\.linear_[12])"
)
# lora_target_modules of examples/glm46v and examples/paddleocr-vl of Axolotl (067b021), and all linear layers.
OF_AXOLOTL = {
    "glm46v": ["gate_proj", "down_proj", "up_proj", "q_proj", "v_proj", "k_proj", "o_proj"],
    "paddleocr_vl": PADDLE,
    "linear": None,
}
PUBLISHED = {"glm46v": "zai-org/GLM-4.6V-Flash"}


@pytest.mark.parametrize("name", OF_AXOLOTL)
def test_those_of_axolotls_configs_are_pefts(tmp_path, name):
    family, targets = "paddleocr_vl" if name == "linear" else name, OF_AXOLOTL[name]
    base = made(family, tmp_path / "base")
    words = {"lora_target_modules": targets} if targets else {"lora_target_linear": True}
    path = PUBLISHED.get(family, "PaddlePaddle/PaddleOCR-VL-1.6")
    config = axolotl(**CHAT, **LORA, **words, processor_type="AutoProcessor", base_model=path).config
    if targets is None:  # find_all_linear_names
        model = AutoModelForImageTextToText.from_pretrained(base)
        linear = {one.rpartition(".")[2] for one, module in model.named_modules() if "Linear" in type(module).__name__}
        targets = sorted(linear - {"lm_head"})
    theirs = {one.rpartition(".lora_A")[0] for one in peft_on(base, target_modules=targets).state_dict()}
    expected = {one.removeprefix("base_model.model.") for one in theirs if one}
    _, plan = planned(base, config["adapter"]["targets"], **config["vision"])
    assert set(plan.targets.value) == expected
    assert {part_of(f"{one}.weight") for one in expected} == {None, "tower", "projector"}
    _, twin = planned(base, config["adapter"]["targets"], tower="adapter")
    assert set(twin.targets.value) < expected


# Axolotl's examples (0.19): gemma3n/gemma-3n-e2b-vision-qlora.yml, gemma4-unified/12b-vision-lora.yaml,
# LiquidAI/lfm2-vl-lora.yaml, llama-4/scout-vision-qlora-fsdp2-flex.yaml.
LAYERS = r"model.language_model.layers.[\d]+."
ENDING = r"(mlp|self_attn).(up|down|gate|q|k|v|o)_proj"
AXOLOTL = {
    "gemma3n": ("google/gemma-3n-E2B-it", LAYERS + ENDING),
    "gemma4_unified": ("google/gemma-4-12B-it", LAYERS + r"(_checkpoint_wrapped_module.)?" + ENDING),
    "lfm2_vl": ("LiquidAI/LFM2-VL-450M", LAYERS + ENDING.replace("mlp|", "mlp|cross_attn|")),
    "llama4": (
        "axolotl-quants/Llama-4-Scout-17B-16E-Linearized-bnb-nf4-bf16",
        [f"self_attn.{one}_proj" for one in "qkvo"]
        + [f"shared_expert.{one}_proj" for one in ("gate", "up", "down")]
        + ["vision_adapter.mlp.fc1", "vision_adapter.mlp.fc2"],
    ),
}


@pytest.mark.parametrize("name", AXOLOTL)
def test_axolotls_examples_adapt_what_peft_does(tmp_path, name):
    published, targets = AXOLOTL[name]
    words = {"base_model": published, "processor_type": "AutoProcessor", "chat_template": "tokenizer_default"}
    config = axolotl(**CHAT, **LORA, **words, lora_target_modules=targets).config
    base = wrapper(name, tmp_path / "base")
    theirs = {one.rpartition(".lora_A")[0] for one in peft_on(base, target_modules=targets).state_dict()}
    expected = {one.removeprefix("base_model.model.") for one in theirs if one and "audio" not in one}  # not heard
    _, plan = planned(base, config["adapter"]["targets"], **config.get("vision", {}))
    assert set(plan.targets.value) == expected
    _, twin = planned(base, config["adapter"]["targets"])
    assert (set(twin.targets.value) < expected) == (name == "llama4")  # whose targets reach the tower


@pytest.mark.parametrize("name", EACH)
def test_they_are_saved_merged_and_resumed(tmp_path, name):
    base = made(name, tmp_path / "base")
    records(tmp_path)
    both = TOWER | ({"projector": "adapter"} if name == "mllama" else {})
    raw = config(tmp_path, "whole") | {"vision": both, "adapter": {"kind": "lora", "rank": 2, "dropout": 0.1}}
    raw["data"] |= {"max_length": 512}
    trained_and_resumed(raw, tmp_path)
    saved = load_file(tmp_path / "whole" / "adapter_model.safetensors")
    assert {part_of(key) for key in saved} == {None, *both}
    moved = {part_of(key) for key, one in saved.items() if "lora_B" in key and float(one.abs().max()) > 0}
    assert moved == {None, *both}
    plain = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32, attn_implementation="sdpa")
    plain = PeftModel.from_pretrained(plain, str(tmp_path / "whole")).eval()
    batch, theirs_on = inputs_of(name, base, tmp_path)
    merged = export_model(str(tmp_path / "whole"), tmp_path / "merged", merge=True).folder
    whole = AutoModelForImageTextToText.from_pretrained(merged, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.no_grad():
        wanted = theirs_on(plain).item()
        assert theirs_on(whole).item() == pytest.approx(wanted, rel=FP32_RELATIVE)
        assert sft_loss(opened(merged), batch).loss.item() == pytest.approx(wanted, rel=FP32_RELATIVE)
        assert sft_loss(opened(base), batch).loss.item() > wanted  # twin: untrained


def refused(tmp_path, code, where, **changes):
    raw = config(tmp_path, "run") | changes
    with raises_fault(code, where):
        surefoot.train({key: value for key, value in raw.items() if value}, stream=io.StringIO())


def test_what_cannot_be_is_refused_in_one_line(tmp_path):
    seeing_family("mllama", tmp_path / "base")
    records(tmp_path)
    text = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello"}]}
    lora = {"kind": "lora", "rank": 2}
    refused(tmp_path, "SF-CONFIG-CONFLICT", "vision.tower", vision=TOWER, adapter=None)
    refused(tmp_path, "SF-ADAPTER-TARGETS", "vision.tower", vision=TOWER, adapter=lora | {"targets": ["up_proj"]})
    alone = {"vision": TOWER, "adapter": lora | {"targets": [READS, "fc1"]}}
    with (tmp_path / "d.jsonl").open("a") as file:
        file.write(json.dumps(text) + "\n")
    refused(tmp_path, "SF-DATA-PICTURE", "data.train", **alone, data={"train": str(tmp_path / "d.jsonl")})
    records(tmp_path)  # twin: without the text
    surefoot.train(config(tmp_path, "run") | alone, stream=io.StringIO())
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()
