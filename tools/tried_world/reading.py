"""Read training scripts out of Python files, notebooks and pages, and what they need besides models and data sets."""

from __future__ import annotations

import ast
import builtins
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from translated import commands
from tried_world.child import made_rows
from tried_world.hub import FAMILIES

_SUFFIXES = (".py", ".ipynb", ".md", ".mdx")
_DATA = (".json", ".jsonl", ".csv", ".txt", ".parquet")
_TRAINER, _TRAIN = re.compile(r"\b\w*Trainer\("), re.compile(r"\.train\(")
_BLOCK = re.compile(r"^([ \t]*)```(?:python|py)\b[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_MAGIC = re.compile(r"^([ \t]*)([!%?][^\n]*?)(?:\\\n[^\n]*?)*$", re.MULTILINE)
_LITERAL = re.compile(r"""(["'])((?:/|[A-Za-z]:/|\./|\.\./|~/|[\w-]+/[\w.-]+/)[^"'\n]{2,}?)\1""")
_SIZE = re.compile(r"-\d+(\.\d+)?b\b")
_FILE = re.compile(r"""["']([^"'\n{}]+\.(?:jsonl?|csv|txt|parquet))["']""")
_OTHER_MACHINE = re.compile(
    r"^/(root|content|kaggle|home|mnt|data|workspace|path|opt|scratch|gemini|tmp|sagemaker|dbfs)/"
)
_GPU: tuple[tuple[str, str], ...] = (
    (r"""(["'])cuda(:\d+)?\1""", '"cpu"'),
    (r"\.cuda\(\)", ""),
    (r"\b(bnb|bitsandbytes)\.nn\.(Linear4bit|Linear8bitLt)\b", '__import__("torch").nn.Linear'),
    (r"(?<=_token_id = )\d{4,}\b", "tokenizer.convert_tokens_to_ids(tokenizer.eos_token)"),
)
_OUTSIDE = (
    (r"^\s*(from|import) unsloth", "uses unsloth, which needs a GPU"),
    (
        r"AutoModelFor(Image|Vision|Object|Semantic|Video|Depth|Zero|Audio|Speech|CTC|Keypoint|Document|Multimodal)\w*|"
        r"AutoModelForSpeechSeq2Seq|ViTFor\w+|Wav2Vec2For\w+|WhisperFor\w+|SegformerFor\w+|\w+VLForConditional\w+|"
        r"AutoImageProcessor|\w+ImageTrainer|Idefics\w*For\w+|Ministral3For|Mistral3For|PaliGemma",
        "reads pictures or sound",
    ),
    (
        r"SentenceTransformerTrainer|SetFitTrainer|CrossEncoderTrainer",
        "trains a model of sentence-transformers or setfit",
    ),
)
_PLACEHOLDER, _UNKNOWN = re.compile(r"<[\w /.-]+>|\$\{?\w+\}?|\{[\w ]+\}"), "UNKNOWN"
REQUIRED = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct", "model_name": "Qwen/Qwen2.5-0.5B-Instruct",
    "base_model": "Qwen/Qwen2.5-0.5B-Instruct", "model_id": "Qwen/Qwen2.5-0.5B-Instruct",
    "base_model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct", "output_dir": "out", "dataset_name": "tatsu-lab/alpaca",
    "data_path": "data.json", "train_file": "data.json", "dataset_path": "data.json",
    "train_file_dir": "data", "dataset": "tatsu-lab/alpaca", "dataset_id_or_path": "tatsu-lab/alpaca",
    "template_name": "qwen",
}  # fmt: skip
"""Values of arguments that a script requires and its page does not give."""
_OWN_MODELS = (("qwen", REQUIRED["model_name"]), ("llama|vicuna", "meta-llama/Llama-2-7b-hf"),
               ("bloom", "bigscience/bloom-560m"))  # fmt: skip
"""Models in place of the one there, for scripts that name a family and count on its tokens."""
_DATA_NAMES = ("dataset_name", "data_path", "train_file", "dataset_path", "train_file_dir", "dataset")
_ROWS = ("data_path", "train_file", "dataset_path", "eval_data_path")


@dataclass(frozen=True)
class Script:
    """A script to run.

    name: for people. text: its source. arguments: of its command line. imports: folders that it imports from.
    fault: why it cannot run, "" if it can. replaced: what was changed in its text.
    """

    name: str
    text: str
    arguments: Sequence[str] = ()
    imports: Sequence[Path] = ()
    fault: str = ""
    replaced: Sequence[str] = field(default=())

    @property
    def launched(self) -> bool:
        """Whether the script is made for a launcher of several processes."""
        return "torch.distributed." in self.text or "LOCAL_RANK" in self.text

    def write_files(self, place: Path, arguments: Sequence[str]) -> None:
        """Write rows into files that the script opens and does not have."""
        for flag, value in pairwise(arguments):
            if flag == "--output_dir" and not value.startswith(("/", "-")):
                (place / value).mkdir(parents=True, exist_ok=True)  # the commands of some pages make it first
        found = _FILE.findall(self.text) + [
            word for word in arguments if re.search(r"\.(jsonl?|csv|txt|parquet)$", word)
        ]
        for name in found:
            rows = list(made_rows.rows(made_rows.columns_of_file(name, self.text)))
            path = place / name
            if not name.startswith(("http", "/", "~")) and ".." not in name and "*" not in name and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(_written(path.suffix, rows))

    def link_files(self, place: Path) -> None:
        """Link what stands beside the script and above it in its repository, whose folder has the file .commit."""
        for folder in self.imports:
            for one in folder.iterdir():
                if one.suffix not in (".py", ".ipynb") and not (place / one.name).exists():
                    (place / one.name).symlink_to(one)
            if (folder / ".commit").is_file():
                break


def _written(suffix: str, rows: list[dict[str, object]]) -> str:
    if suffix == ".jsonl":
        return "\n".join(map(json.dumps, rows))
    if suffix == ".csv":
        cells = [",".join(rows[0]), *(",".join(json.dumps(str(one)) for one in row.values()) for row in rows)]
        return "\n".join(cells)
    return json.dumps(rows, indent=1) if suffix == ".json" else "\n".join(made_rows.text(n) for n in range(24))


def read_folder(path: Path) -> Iterator[Script]:
    """Yield the scripts of a file or of a folder and those under it."""
    paths = sorted(one for one in path.rglob("*") if one.suffix in _SUFFIXES) if path.is_dir() else [path]
    for one in paths:
        text = one.read_text(errors="replace")
        if not (_TRAINER.search(text) and _TRAIN.search(text)):
            continue
        name = one.as_posix()
        if one.suffix == ".py":
            yield made(name, text, arguments_of(one, text), (one.parent, *one.parents[1:3]))
        elif one.suffix == ".ipynb":
            yield made(name, notebook(text), (), (one.parent,))
        else:
            yield from (made(f"{name}#{number}", block) for number, block in blocks(text))


def made(name: str, text: str, arguments: Sequence[str] = (), imports: Sequence[Path] = ()) -> Script:
    """Return a script with the words replaced that this machine cannot follow."""
    replaced = []
    for pattern, other in _GPU:
        text, count = re.subn(pattern, other, text)
        if count:
            replaced.append(f"{count} times {pattern}")
    text = _LITERAL.sub(_here, text)
    arguments = [_argument(word) for word in arguments]
    fault = next((why for pattern, why in _OUTSIDE if re.search(pattern, text, re.MULTILINE)), "")
    try:
        ast.parse(text)
    except SyntaxError as error:
        fault = f"is no Python: {error.msg}, line {error.lineno}"
    return Script(name, text, arguments, [one.resolve() for one in imports], fault, replaced)


def _argument(word: str) -> str:
    return _local(word) if not Path(word).is_file() and re.match(r"^(/|\./|\.\./|~/)", word) else word


def _here(literal: re.Match[str]) -> str:
    return f"{literal[1]}{_local(literal[2])}{literal[1]}"


def _local(path: str) -> str:
    """Return what stands for a path: an id on the hub for a model's folder, else a path below this folder."""
    last = path.rstrip("/").rpartition("/")[2]
    if "path/to/" in path and not re.search(r"out|data", path):  # "/path/to/llama-7B/hf"
        last = path.strip("./").replace("/", "-")
    written = Path(last).suffix in _DATA or re.search(r"out|result|ckpt|checkpoint|save|lora|log", path.lower())
    below = re.search(r"/models?/[^/]+/?$", path.lower())
    known = "data" not in path.lower() and any(re.search(pattern, last.lower()) for pattern, _ in FAMILIES)
    if not written and (below or known or _SIZE.search(last.lower())):
        return f"local/{last}"
    path = re.sub(r"^[A-Za-z]:", "", path)
    return f".{path}" if _OTHER_MACHINE.match(path) else path.replace("../", "./").replace("~/", "./")


def notebook(text: str) -> str:
    """Return the code of a notebook's cells up to the last one that trains, without shell and magic lines."""
    try:
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    except (ValueError, KeyError):
        return "no notebook"
    codes = ["".join(cell["source"]) for cell in cells]
    codes = [code for code in codes if not code.lstrip().startswith("%%")]
    last = max((place for place, code in enumerate(codes) if _TRAIN.search(code)), default=len(codes) - 1)
    return _MAGIC.sub(r"\1pass  # \2", "\n\n".join(codes[: last + 1]))


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yield each block of a page that trains, with its number: alone if it imports what it uses, else with those before
    it."""
    codes = [re.sub(rf"^{found[1]}", "", found[2], flags=re.MULTILINE) for found in _BLOCK.finditer(text)]
    codes = [_MAGIC.sub(r"\1pass  # \2", re.sub(r"^(>>>|\.\.\.) ?", "", code, flags=re.MULTILINE)) for code in codes]
    for place, code in enumerate(codes):
        if _TRAIN.search(code) and (_TRAINER.search(code) or any(map(_TRAINER.search, codes[:place]))):
            yield place + 1, code if _whole(code) else "\n\n".join(codes[: place + 1])


def _whole(code: str) -> bool:
    """Return whether a block imports what it uses."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return False
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    imports = [one for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) for one in node.names]
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)} | set(dir(builtins))
    bound |= {(one.asname or one.name).partition(".")[0] for one in imports}
    bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    bound |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return bool(imports) and {node.id for node in names} <= bound


def arguments_of(path: Path, text: str) -> list[str]:
    """Return the arguments of the command that the script or a page beside it quotes, and of what it requires."""
    quoted: list[str] = []
    beside = (
        one
        for folder in path.parents[:2]
        for kind in ("*.md", "*.sh", "scripts/*.sh")
        for one in sorted(folder.glob(kind))
    )
    for page in (path, *beside):
        source = _PLACEHOLDER.sub(_UNKNOWN, text if page == path else page.read_text(errors="replace"))
        for words in commands(source):
            place = next((n for n, word in enumerate(words) if word.endswith(path.name)), None)
            if place is not None and not quoted:
                quoted = [_beside(path, word) for word in words[place + 1 :] if word not in ("\\", "&")]
    words = [*_filled(quoted), *(word for name in _declared(text) for word in _missing(name, quoted))]
    model = next((one for name, one in _OWN_MODELS if re.search(name, text, re.IGNORECASE)), REQUIRED["model_name"])
    values = {REQUIRED["model_name"]: model}
    if re.search(r"\b(Reward|DPO|ORPO|CPO)Trainer\(", text):
        values[REQUIRED["dataset_name"]] = "trl-lib/ultrafeedback_binarized"
    return [values.get(word, word) for word in words]


def _filled(words: Sequence[str]) -> list[str]:
    """Replace placeholders by values; a flag whose value nobody knows goes with it."""
    filled: list[str] = []
    for word in words:
        if _UNKNOWN not in word:
            filled.append(word)
        elif filled and filled[-1].lstrip("-") in REQUIRED:
            filled.append(REQUIRED[filled[-1].lstrip("-")])
        elif filled and filled[-1].startswith("--"):
            filled.pop()
        if filled[-2:-1] and filled[-2].lstrip("-") in _ROWS and "path/" in filled[-1]:
            filled[-1] = REQUIRED["data_path"]
    return filled


def _declared(text: str) -> list[str]:
    """Return the names of arguments that a parser of the script knows."""
    if not re.search(r"HfArgumentParser|TrlParser|ArgumentParser\(|fire\.Fire|@dataclass", text):
        return []
    names = re.findall(r"^ +(\w+): [^=\n]+= ?(?:field\(|None|\"\")|add_argument\(\s*[\"']--(\w+)", text, re.MULTILINE)
    own = {one for pair in names for one in pair if one}
    if re.search(r"TrlParser\(\s*\(?[^)]*ScriptArguments", text) and "class ScriptArguments" not in text:  # TRL's own
        own |= {"dataset_name", "model_name_or_path"}
    parsed = re.search(r"(HfArgument|Trl)Parser\(\s*\(?[^)]*(Training|Config)", text)  # with a library's arguments
    return [name for name in REQUIRED if name in own or (name == "output_dir" and parsed)]


def _missing(name: str, words: Sequence[str]) -> tuple[str, ...]:
    names = _DATA_NAMES if name in _DATA_NAMES else (name,)
    given = any(word.lstrip("-").partition("=")[0].replace("-", "_") in names for word in words)
    return () if given else (f"--{name}", REQUIRED[name])


def _beside(script: Path, word: str) -> str:
    """Return the path of a file that stands beside the script or above it, other words as they are."""
    found = (folder / word for folder in script.resolve().parents[:3] if re.search(r"\.\w+$", word))
    return next((str(one) for one in found if one.is_file()), word)


def required(said: str) -> list[str]:
    """Return words for the arguments that a parser calls required."""
    found = re.findall(r"the following arguments are required: (.*)", said)
    names = [word.split("/")[0].lstrip("-") for one in found for word in re.split(r",\s*", one.strip())]
    return [word for name in names if name in REQUIRED for word in (f"--{name}", REQUIRED[name])]
