"""What a script sets of torch and of its process: the plan allows and forbids the attention kernels that torch would be
left with, products are rounded as asked, variables are set, and what is not read is told."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from surefoot.config.schema import AttentionConfig
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_command, translate_file
from surefoot.models.attention import attention_context
from surefoot.planning.attention import plan_attention
from surefoot.planning.notes import Notes
from surefoot.system.hardware import preset

SCRIPT = """\
import os
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
{before}
model = AutoModelForCausalLM.from_pretrained("m"{load})
data = load_dataset("json", data_files="d.json", split="train")
trainer = Trainer(model=model, args=TrainingArguments(output_dir="out"), train_dataset=data)
{train}
"""
TRAIN = "trainer.train()"


def translated(before="", train=TRAIN, load=""):
    return translate_file("train.py", SCRIPT.format(before=before, train=train, load=load), [], Options())


def enabled():
    cuda = torch.backends.cuda
    return {"flash": cuda.flash_sdp_enabled(), "mem_efficient": cuda.mem_efficient_sdp_enabled(),
            "math": cuda.math_sdp_enabled(), "cudnn": cuda.cudnn_sdp_enabled()}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_before():
    before = enabled()
    yield
    for name, on in before.items():
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(on)


def planned(found):
    """What SDPA may dispatch to while the translated run trains, on a GPU where every kernel can run."""
    request = AttentionConfig(**found.config.get("attention", {}))
    plan = plan_attention(request, hardware=preset("h100"), compute="bf16", head_dim=64, dropout=0.0,
                          trials=(), notes=Notes())  # fmt: skip
    with attention_context(plan):
        return enabled()


CALLS = [
    "torch.backends.cuda.enable_flash_sdp(False)",
    "torch.backends.cuda.enable_mem_efficient_sdp(enabled=False)",
    "from torch.backends import cuda as cuda_backend\ncuda_backend.enable_flash_sdp(False)\n"
    "cuda_backend.enable_mem_efficient_sdp(True)\ncuda_backend.enable_math_sdp(True)",
    "import torch.backends.cuda as c\nc.enable_math_sdp(False)",
    "from torch.backends.cuda import enable_flash_sdp as flash, enable_math_sdp\nflash(False)\nenable_math_sdp(False)",
    "switch = torch.backends.cuda.enable_flash_sdp\nswitch(True)\nswitch(False)",
    "def prepare():\n    if True:\n        torch.backends.cuda.enable_flash_sdp(False)\nprepare()",
]
CONTEXTS = {
    "sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)": [SDPBackend.EFFICIENT_ATTENTION],
    "sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])": [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION],
    "sdpa_kernel(backends=[SDPBackend.CUDNN_ATTENTION])": [SDPBackend.CUDNN_ATTENTION],
    "torch.backends.cuda.sdp_kernel(enable_flash=False, enable_math=True, enable_mem_efficient=False, "
    "enable_cudnn=False)": [SDPBackend.MATH],
}  # fmt: skip
IMPORTS = "from torch.nn.attention import SDPBackend, sdpa_kernel"


@pytest.mark.parametrize("calls", CALLS)
def test_calls_leave_the_plan_the_kernels_that_they_leave_torch(calls):
    found = translated(calls)
    assert not [note for note in found.notes if note.outcome == "changed"]
    exec(calls, {"torch": torch})
    asked, ours = enabled(), planned(found)
    assert {**asked, "cudnn": False} == ours  # which nobody asked for, and which torch allows
    assert planned(translated()) != ours  # twin: without the calls


@pytest.mark.parametrize("context", CONTEXTS)
def test_training_inside_of_a_context_has_its_kernels(context):
    inside = planned(translated(IMPORTS, f"with {context}:\n    {TRAIN}"))
    with sdpa_kernel(CONTEXTS[context]):
        assert enabled() == inside
    named = planned(translated(IMPORTS, f"chosen = {context}\nwith chosen:\n    {TRAIN}"))
    assert named == inside
    elsewhere = translated(IMPORTS, f"with {context}:\n    print(1)\n{TRAIN}")
    assert "attention" not in elsewhere.config
    assert [note.outcome for note in elsewhere.notes if note.where.startswith("train.py:9")] == ["changed"]


def test_eager_attention_has_no_kernels_to_switch():
    found = translated(CALLS[0], load=", attn_implementation='eager'")
    assert found.config["attention"] == {"implementation": "eager"}
    assert [note.outcome for note in found.notes if note.word == CALLS[0]] == ["listed"]


def test_a_kernel_that_is_chosen_at_run_time_is_told():
    found = translated("torch.backends.cuda.enable_flash_sdp(os.environ.get('A') == '1')")
    assert "attention" not in found.config
    assert [(note.outcome, note.where) for note in found.notes if "sdp" in note.word] == [("changed", "train.py:5:1")]


@pytest.mark.parametrize(
    ("statement", "tf32"),
    [
        ("torch.set_float32_matmul_precision('high')", "on"),
        ("torch.set_float32_matmul_precision('highest')", "off"),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "on"),
        ("torch.backends.cuda.matmul.allow_tf32 = False", "off"),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "on"),
        ("from torch.backends import cuda\ncuda.matmul.allow_tf32 = True", "on"),
        ("torch.backends.cudnn.allow_tf32 = True", None),
    ],
)
def test_products_are_rounded_as_the_script_asks(statement, tf32):
    found = translated(statement)
    assert found.config["precision"].get("tf32") == tf32
    told = [note for note in found.notes if note.word == statement.splitlines()[-1]]
    assert [note.outcome for note in told] == ["carried" if tf32 else "listed"]


@pytest.mark.parametrize(
    "statement",
    [
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False",
        "torch.backends.cuda.preferred_linalg_library('magma')",
        "torch.set_float32_matmul_precision(os.environ['P'])",
        "os.environ['A'] = str(3)",
        "os.environ.update(values())",
        "os.environ.pop('SDPA_BACKEND', None)",
        "del os.environ['SDPA_BACKEND']",
    ],
)
def test_what_is_not_read_is_told(statement):
    assert [note.outcome for note in translated(statement).notes if note.where.startswith("train.py:5")] == ["changed"]


def test_variables_are_set_for_the_run():
    lines = ["from os import environ as env", "os.environ['A'] = '1'", "env.setdefault('B', '2')",
             "env.update({'C': '3'}, D='4')"]  # fmt: skip
    text = SCRIPT.format(before="\n".join(lines), train=TRAIN, load="")
    found = translate_file("train.py", text, [], Options())
    assert found.environment == {"A": "1", "B": "2", "C": "3", "D": "4"}
    assert {note.word: note.where for note in found.notes if note.outcome == "carried"}["A=1"] == "train.py:6:1"
    typed = translate_command(["A=x", "B=y", "python", "train.py"], Options(read=lambda path: text))
    assert dict(typed.environment) == {"A": "1", "B": "y", "C": "3", "D": "4"}  # setdefault sets what is not there
