"""README.md of a run folder: the model card that a hub shows.

Only known facts are written: no empty license, no "None", no local path. The code under "Use" runs as it is, which a
test checks; for a reward model it scores one answer with transformers, PEFT and safetensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import yaml

from surefoot.families.model_facts import OPENED_BY
from surefoot.families.template_row import Prompt
from surefoot.families.templates import find_row
from surefoot.method_facts.methods import METHODS
from surefoot.planning.plan import OFF, QAT_BLOCKS, ZERO, Choice, RunPlan
from surefoot.report.footer import EXAMPLE_PROMPT
from surefoot.report.tables.plan import who_and_why
from surefoot.report.trainer_log import UNITS
from surefoot.system.folders import QUANTISED
from surefoot.system.messages import counted, was

_PATH = re.compile(r"(?<![\w/.<])(?:[A-Za-z]:)?(?:[\\/][\w.@+-]+)+[\\/]([\w.@+-]+)")
_METRICS = {
    "train_first_reward": "mean reward of the first rollout",
    "train_last_reward": "mean reward of the last rollout",
    "eval_reward": "evaluation reward",
    "train_loss": "training loss (mean over {})",
    "eval_loss": "evaluation loss",
    "perplexity": "evaluation perplexity",
    "eval_accuracy": "evaluation accuracy of supervised tokens",
    "eval_reward_accuracy": "evaluation reward accuracy",
    "eval_reward_margin": "evaluation reward margin",
    "chance": "accuracy by chance",
    "accuracy_before": "accuracy before training",
    "accuracy_after": "accuracy after training",
}
_SHARES = frozenset({"eval_accuracy", "eval_reward_accuracy", "chance", "accuracy_before", "accuracy_after"})


@dataclass(frozen=True)
class DataFile:
    """A data file on the model card.

    role: "training" or "evaluation".
    name: file name without its folder.
    examples: number used, after dropping.
    """

    role: str
    name: str
    sha256: str
    records: int
    examples: int
    tokens: int
    supervised: int


@dataclass(frozen=True)
class CardFacts:
    """Facts for the model card.

    name: the run's name.
    base: hub id or folder as the user gave it.
    settings: setting -> value, from the config ("learning rate" -> "0.0002").
    results: all_results.json.
    versions: library -> version.
    prompt: a complete example prompt with BOS if the saved chat template does not format the prompts of this run, else
        None.
    question: an example question for the chat template.
    plots: picture names in the run folder.
    end: the token that ends every answer of a reward model.
    merged: whether the adapter is merged into the published weights.
    opened_by: transformers' class that loads the model.
    stored_form: the form with fewer bits that the base's files are in, "" if they are plain.
    """

    name: str
    stage: str
    base: str
    base_is_hub_id: bool
    base_revision: str | None
    plan: RunPlan
    settings: Mapping[str, str]
    data: tuple[DataFile, ...]
    results: Mapping[str, object]
    versions: Mapping[str, str]
    hardware: str
    prompt: str | None = None
    plots: tuple[str, ...] = ()
    question: str = EXAMPLE_PROMPT
    end: str = ""
    merged: bool = False
    opened_by: str = OPENED_BY
    stored_form: str = ""

    @property
    def needs_base(self) -> bool:
        """Whether the folder holds an adapter, which needs its base model."""
        return self.plan.adapter is not None and not self.merged


def model_card(facts: CardFacts) -> str:
    """Return the text of README.md."""
    sections = {
        "Use": f"{_usage_notes(facts)}```python\n{usage_code(facts)}```",
        "Data": _data_table(facts.data),
        "Training": f"{_plan_table(facts.plan)}\n\n{_table(('setting', 'value'), facts.settings.items())}".rstrip(),
        "Results": f"{_results_table(facts.results)}{_pictures(facts.plots)}".strip(),
        "Environment": f"{facts.hardware}\n\n{_table(('library', 'version'), facts.versions.items())}".rstrip(),
    }
    parts = [
        f"---\n{yaml.safe_dump(_header(facts), sort_keys=False, allow_unicode=True)}---",
        f"# {facts.name}",
        _summary(facts),
        *(f"## {title}\n\n{text}" for title, text in sections.items() if text),
        "Every choice is explained in `plan.json`; `surefoot verify` checks the files of this folder.",
    ]
    return "\n\n".join(parts) + "\n"


def usage_code(facts: CardFacts) -> str:
    """Python that loads the model from the card's folder and answers one prompt."""
    return "".join(f"{line}\n" for line in [*_loading_lines(facts), "", *_prompt_lines(facts)])


def without_paths(text: str) -> str:
    """Shorten absolute paths to their last part."""
    return _PATH.sub(r"\1", text)


def base_name(facts: CardFacts) -> str:
    """The hub id, or the name of the folder."""
    return facts.base if facts.base_is_hub_id else re.split(r"[\\/]", facts.base.rstrip("\\/"))[-1]


def _header(facts: CardFacts) -> dict[str, object]:
    adapter = facts.plan.adapter
    header: dict[str, object] = {"library_name": "peft" if facts.needs_base else "transformers"}
    if facts.base_is_hub_id:
        header["base_model"] = facts.base
        header["base_model_relation"] = "adapter" if facts.needs_base else "finetune"
    header["pipeline_tag"] = "text-classification" if facts.plan.reward else "text-generation"
    header["tags"] = ["surefoot", facts.stage, adapter.kind.value if adapter else "full-fine-tuning"]
    return header


def _summary(facts: CardFacts) -> str:
    name = base_name(facts)
    base = f"[{name}](https://huggingface.co/{name})" if facts.base_is_hub_id else f"`{name}`"
    revision = f" (revision `{facts.base_revision}`)" if facts.base_revision else ""
    method = METHODS[facts.stage].title
    plan = facts.plan
    share = f"{plan.trainable:,} of {plan.with_adapter:,} parameters trained"
    if plan.adapter is None:
        return f"{base}{revision} after {method} of all weights ({share})."
    kind = {"lora": "LoRA", "dora": "DoRA"}[plan.adapter.kind.value]
    started = plan.adapter.start != ZERO
    adapter = f"{kind} adapter of rank {plan.adapter.rank * (2 if started else 1)}"
    adapter += f" ({plan.adapter.start} of half of it)" if started else ""
    if facts.merged:
        return f"{base}{revision} with a {adapter} merged into it, made by {method} ({share})."
    return f"{adapter} for {base}{revision}, made by {method} ({share})."


def _usage_notes(facts: CardFacts) -> str:
    notes = ""
    if facts.needs_base and not facts.base_is_hub_id:
        notes += "The base model is not on a hub: put its folder in place of the name below.\n\n"
    if facts.needs_base and facts.stored_form:
        notes += (
            f"The base's files are in {facts.stored_form}; the adapter was trained over their decoded weights. "
            "`surefoot export BASE --out PLAIN` writes those: put PLAIN in place of the name below. Over the files "
            "themselves transformers needs another library, and PEFT accepts only some adapters.\n\n"
        )
    if facts.plan.precision.qat.value != OFF and not facts.needs_base:
        to = facts.plan.precision.qat.value
        needs = "torchao and a GPU that multiplies 4-bit numbers" if to in QAT_BLOCKS else "torchao"
        notes += (
            f"In training, and where it was measured, the weights were rounded to {to}. "
            f"The folder `{QUANTISED}` holds them like that; to use it instead of this one needs {needs}.\n\n"
        )
    if isinstance(find_row(facts.plan.tokenizer.template.value), Prompt) and facts.prompt is None:
        notes += "A prompt's input (context) goes into the field `input` of its message, beside `content`.\n\n"
    scale = facts.plan.tokenizer.bos_scale.value
    if scale != 1:
        notes += (
            "This model was trained with the embedding of the first token of every sequence "
            f"**multiplied by {scale:g}** (`bos_zero_config.json`). transformers and PEFT do not apply that when they "
            "load it: the loaded model silently differs from the trained one. `surefoot generate` and "
            "`surefoot chat` apply it, and so does the line below that begins with `surefoot`.\n\n"
        )
    if facts.plan.tokenizer.added_rows and facts.needs_base:
        count = facts.plan.tokenizer.added_rows
        rows = f"{counted(count, 'row')} {was(count)}"
        notes += f"{rows} added to the embeddings, so the base **must be resized** before the adapter is loaded.\n\n"
    return notes


_IMPORTS = "from transformers import {opened_by}, AutoTokenizer\n"


def _loading_lines(facts: CardFacts) -> list[str]:
    folder = 'folder = "."  # this folder, or the hub id it was published under'
    tokenizer = "tokenizer = AutoTokenizer.from_pretrained(folder)"
    scale = facts.plan.tokenizer.bos_scale.value
    scaling = [] if scale == 1 else [f"surefoot.install_bos_scaling(model, {scale!r})"]
    own = [] if scale == 1 else ["import surefoot"]
    if not facts.needs_base:
        return [
            *own,
            _IMPORTS.format(opened_by=facts.opened_by),
            folder,
            tokenizer,
            f"model = {facts.opened_by}.from_pretrained(folder)",
            *scaling,
        ]
    tokens = facts.plan.tokenizer
    resize = [f"model.resize_token_embeddings({tokens.rows})"] if tokens.rows else []
    revision = f", revision={facts.base_revision!r}" if facts.base_revision else ""
    imports, rounding, rounded = _rounding_lines(facts.plan)
    given = ", quantization_config=rounding" if rounding else ""
    return [
        *own,
        *imports,
        "from peft import PeftModel",
        _IMPORTS.format(opened_by=facts.opened_by),
        f"base = {base_name(facts)!r}",
        folder,
        tokenizer,
        *rounding,
        f"model = {facts.opened_by}.from_pretrained(base{revision}{given})",
        *rounded,
        *resize,
        "model = PeftModel.from_pretrained(model, folder)",
        *scaling,
    ]


def _rounding_lines(plan: RunPlan) -> tuple[list[str], list[str], list[str]]:
    """Imports, and the line before or after loading that rounds the base as in training with `precision.qat`; all empty
    without it."""
    to, group = plan.precision.qat.value, plan.precision.qat_group
    if to == OFF:
        return [], [], []
    if to in QAT_BLOCKS:
        line = f"round_weights(model, {to!r}, {group})  # as in training"
        return ["from surefoot.models.qat import round_weights"], [], [line]
    per, size = ("PerGroup", group) if group else ("PerAxis", 0)
    integers, front = to.rpartition("-")[2], "weight_" if "-" in to else ""
    name = "Int8DynamicActivationIntxWeightConfig" if "-" in to else "IntxWeightOnlyConfig"
    made = f"{name}(weight_dtype=torch.{integers}, {front}granularity={per}({size}))"
    imports = [
        "import torch",
        f"from torchao.quantization import {name}, {per}",
        "from transformers import TorchAoConfig",
    ]
    return imports, [f"rounding = TorchAoConfig({made})  # as in training"], []


def _prompt_lines(facts: CardFacts) -> list[str]:
    if facts.plan.reward is not None:
        return scoring_lines(facts.question, facts.end)
    if facts.prompt is None:
        encode = [
            f'messages = [{{"role": "user", "content": {json.dumps(facts.question, ensure_ascii=False)}}}]',
            "inputs = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True',
            ")",
        ]
    else:
        encode = [
            f"prompt = {facts.prompt!r}",
            'inputs = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")',
        ]
    return [
        *encode,
        "output = model.generate(**inputs, max_new_tokens=64)",
        'answer = output[0, inputs["input_ids"].shape[1] :]',
        "print(tokenizer.decode(answer, skip_special_tokens=True))",
    ]


def _plan_table(plan: RunPlan) -> str:
    scaled = plan.tokenizer.bos_scale.value != 1
    rows: list[tuple[str, str, Choice]] = [
        ("matrix products", "precision.compute", plan.precision.compute),
        ("frozen weights" if plan.adapter else "weights", "precision.base", plan.precision.base),
        ("trained weights", "precision.trainable", plan.precision.trainable),
        *([("rounded in training to", "precision.qat", plan.precision.qat)] if plan.precision.qat.value != OFF else []),
        ("attention", "attention", plan.attention.implementation),
        ("padding token", "tokenizer.pad", plan.tokenizer.pad_token),
        ("BOS prepended", "tokenizer.bos", plan.tokenizer.bos),
        *([("scale of the first embedding", "bos.scale", plan.tokenizer.bos_scale)] if scaled else []),
        ("template", "template", plan.tokenizer.template),
        ("batch of an optimizer step", "batch.size", plan.batch.size),
        ("gradient checkpointing", "gradient_checkpointing", plan.memory.gradient_checkpointing),
        *([("reference", "alignment.reference", plan.reference)] if plan.reference else []),
        *([("teacher", "distill.teacher", plan.teacher)] if plan.teacher else []),
    ]
    if plan.adapter:
        rows.insert(0, ("method", "adapter", plan.adapter.kind))
    shown = ((label, _word(c.value), who_and_why(plan, what, c.source, c.reason)[1]) for label, what, c in rows)
    return _table(("choice", "value", "why"), shown)


def _data_table(files: Iterable[DataFile]) -> str:
    rows = (
        (f.role, f.name, f"{f.records:,}", f"{f.examples:,}", f"{f.tokens:,}", f"{f.supervised:,}", f"`{f.sha256}`")
        for f in files
    )
    return _table(("used for", "file", "records", "examples", "tokens", "supervised tokens", "SHA-256"), rows)


def _results_table(results: Mapping[str, object]) -> str:
    counted = next((unit for unit in UNITS if f"train_{unit}" in results and unit != "tokens"), "supervised tokens")
    losses = ("train_loss", "eval_loss") if "train_first_reward" in results else ()  # say nothing of rollouts
    rows = [
        (label.format(counted.replace("_", " ")), _figure(key, results[key]))
        for key, label in _METRICS.items()
        if results.get(key) is not None and key not in losses
    ]
    return _table(("figure", "value"), rows)


def _figure(key: str, value: object) -> str:
    if not isinstance(value, float | int):
        return str(value)
    return f"{value:.1%}" if key in _SHARES else f"{value:.4g}"


def _pictures(plots: Iterable[str]) -> str:
    return "".join(f"\n\n![{plot.removesuffix('.png').replace('_', ' ')}]({plot})" for plot in plots)


def _word(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _table(head: tuple[str, ...], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table, empty if there are no rows."""
    body = [tuple(_cell(value) for value in row) for row in rows]
    lines = [head, ("---",) * len(head), *body] if body else []
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: str) -> str:
    """Escape text for Markdown: `<|eot_id|>` must not become a tag or a column border, nor a name a link or a
    picture."""
    text = " ".join(without_paths(value).split())
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[")


def scoring_lines(question: str, end: str) -> list[str]:
    """Code that scores an answer with a reward model.

    end: the token that ended every answer in training, at which the score is read. The prompt and the answer are
        tokenized separately, as in training.
    """
    return [
        "import torch",
        "from huggingface_hub import snapshot_download",
        "from pathlib import Path",
        "from safetensors.torch import load_file\n",
        "place = Path(folder) if Path(folder).is_dir() else Path(snapshot_download(folder))",
        'head = load_file(place / "value_head.safetensors")',
        f'messages = [{{"role": "user", "content": {json.dumps(question, ensure_ascii=False)}}}]',
        f'answer = "Sleep, move and eat well."{f" + {json.dumps(end, ensure_ascii=False)}" if end else ""}',
        "prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True).input_ids",
        "ids = torch.tensor([prompt + tokenizer(answer, add_special_tokens=False).input_ids])",
        "with torch.no_grad():",
        "    hidden = model.eval().get_decoder()(input_ids=ids).last_hidden_state[0, -1].float()",
        '    score = hidden @ head["v_head.summary.weight"][0] + head["v_head.summary.bias"][0]',
        "print(float(score))  # of two answers to one prompt, the better one has the higher score",
    ]


def ending_token(ids: Sequence[int], stop_ids: Sequence[int]) -> int | None:
    """The stop token that ends an example, None if it ends otherwise."""
    return int(ids[-1]) if len(ids) and ids[-1] in stop_ids else None
