"""Pieces that mean something to readers of other people's files, and inputs that are known to be hard."""

from interop.documented import FILES

NESTED, HUGE = b'{"a": ' + b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"
DIGITS = "9" * 5000  # more than Python makes a number of
_PIECES = (
    r"""{ } [[ ]] " ' : , [] {} "" - &a *a !!x | > # % .. @ ` ? ~ null true NaN 1e999 -0 1_000 0x1F 1:30 \ud800 ² ٣"""
)
_BETWEEN = ["\x00", "\n", "\t", "\r", "\ufeff", ": ", "- ", "9" * 40]
PIECES = [piece.encode() for piece in [*_PIECES.split(), *_BETWEEN]] + [b"\xff"]
_WORDS = """- -- --- = --= -m -c --x --seed --seed= --learning_rate --bf16 nan inf -1 1e999 ² ٣ { [ [] {} a=b =b NAME=
    WORLD_SIZE=² CUDA_VISIBLE_DEVICES=² deepspeed python torchrun accelerate launch --num_gpus --num_processes
    --nproc_per_node --config_file --deepspeed lora.yml lora.yaml simple_finetune.py true None a.b.c=1"""
WORDS = [*_WORDS.split(), "", "\x00", "\ud800", DIGITS, f"WORLD_SIZE={DIGITS}", f"--seed={DIGITS}"]
_JINJA = """{% %} {{ }} {{_ _}} {%_if_messages_%} {%_for_m_in_messages_%} {%_endfor_%} {%_endif_%} {# #}
    _for_m_in_messages_ _endfor_ _if_ _endif_ _set_x_=_
    _messages_ [0] [-1:] .content m['role'] _|_ trim join tojson replace('a','b')
    indent(9) center(99999) batch(2) map('upper') sort _+_ _*_ _**_ _~_ _//_0 'a' '%s' _%_ 9 99999 ( ) _in_ _not_
    _range (9) _namespace _macro_f(x)_ _endmacro_ _f(1)_ a _recursive_ _loop loop.cycle(1) .__class__ _is_ _none_
    defined _dict _break_ _continue_ raise_exception('a') strftime_now('%Y') {%_generation_%} {%_endgeneration_%}
    bos_token .format(1) .split('') |int |float |round(999)"""
JINJA = [*(piece.replace("_", " ") for piece in _JINJA.split()), "bos_token", "__class__", "\n"]
_OVERRIDES = """seed=1 data.train[0].weight=1 data.train.9.weight=1 optim.lr=[ = a.b.c=1 .=1 data.train.²=1 [0]=1 0=1
    data.0=1 optim.betas.0=x batch={size:1} adapter=none data=1"""
OVERRIDE_WORDS = [*_OVERRIDES.split(), f"optim.betas.{DIGITS}=1"]


SCRIPTS = [text for name, text in FILES.items() if name.endswith(".py")]


def with_lines(lines: str) -> str:
    """A script whose run_name is what `lines` make of a0."""
    return SCRIPTS[0].replace("TrainingArguments(", "TrainingArguments(run_name=a0, ", 1) + "\n" + lines


# Each anchor is ten times the one before: its text would fill any memory.
_ANCHORS = "a0: &a0 x\n" + "".join(
    f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 10)}]\n" for number in range(1, 25)
)
REPEATED_TENFOLD = tuple(
    f"{_ANCHORS}configs: [{{config_name: {name}, data_files: {files}}}]"
    for name, files in (("*a24", "b"), ("a", "*a24"), ("a", "{split: *a24, path: *a24}"))
)
DOUBLED_TEXT = "\n".join(f"a{number} = a{number + 1} + a{number + 1}" for number in range(60)) + '\na60 = "x"\n'
DOUBLED_LIST = "\n".join(f"a{number} = [a{number + 1}, a{number + 1}]" for number in range(60)) + "\na60 = 1\n"
LEADS_BACK = """
from records import data
data = data.map(shorten)
trainer = Trainer(model=AutoModelForCausalLM.from_pretrained("m"), args=TrainingArguments("o"), train_dataset=data)
trainer.train()
"""
MODEL_OF_ITSELF = """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
first = AutoModelForCausalLM.from_pretrained("m")
model = get_peft_model(model, LoraConfig(r=4))
trainer = Trainer(model=model, args=TrainingArguments("o"), train_dataset=load_dataset("json", data_files="d.json"))
trainer.train()
"""
HARD_SCRIPTS = (
    with_lines(DOUBLED_TEXT), with_lines(DOUBLED_LIST), with_lines("a0 = 'x' * 10 ** 12"),
    with_lines(f"a0 = {'+'.join('1' * 3000)}"), with_lines("a0 = " + "-" * 200 + "1"), "a = " + "-" * 100_000 + "1",
    LEADS_BACK, MODEL_OF_ITSELF,
    "a = " + "(" * 5000, "a" + ".b" * 5000, f"a = {DIGITS}",
)  # fmt: skip
