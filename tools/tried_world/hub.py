"""A hub of tiny random models: whatever model a client asks for is one of the family that its name tells."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from helpers import zoo, zoo_templates, zoo_tokenizers
from helpers.zoo_modern import MODERN

Build = Callable[[Path], Any]
_LONG = 2048  # positions: scripts pad to lengths of real models
_ROWS = 640  # of the embedding: more than the tokenizer has, for tokens that scripts add
_API = re.compile(r"/api/models/(.+?)(?:/(revision|tree|paths-info)/([^/]+)(?:/.*)?)?")
_FILE = re.compile(r"/(.+?)/resolve/[^/]+/(.+)")


def _other(kind: str, auto: str, sizes: dict[str, Any], folder: Path) -> None:
    """Write a model of a family that has no zoo. sizes: names and values of its config."""
    encoder = auto != "AutoModelForCausalLM"
    _word_pieces(folder) if encoder else zoo_tokenizers.gpt2(folder, None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**sizes, **ids, **({"decoder_start_token_id": 0} if encoder else {}))
    getattr(transformers, auto).from_config(config).save_pretrained(folder)


def _word_pieces(folder: Path) -> None:
    """BERT's kind of tokenizer, with T5's end as well."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "</s>"]
    pieces = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pieces.normalizer = normalizers.BertNormalizer()
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pieces.train_from_iterator(
        zoo_tokenizers.TEXT, trainers.WordPieceTrainer(vocab_size=300, special_tokens=names, show_progress=False)
    )
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    pieces.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    roles = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]",
             "mask_token": "[MASK]", "eos_token": "</s>"}  # fmt: skip
    zoo_tokenizers.save(pieces, folder, "PreTrainedTokenizerFast", None, **roles)


def _modern(kind: str, tokens: Callable[[Path], None], folder: Path, **sizes: Any) -> None:
    """Write a model of the zoo's newer families with its own tokenizer in place of Qwen's. tokens: writes it."""
    MODERN[kind](folder, **sizes)
    tokens(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | ids))


def _bloom(folder: Path) -> None:
    _other("bloom", _CAUSAL, {"hidden_size": 32, "n_layer": 2, "n_head": 4}, folder)
    roles = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    zoo_tokenizers.save(
        zoo_tokenizers.byte_level(first=tuple(roles.values())), folder, "BloomTokenizerFast", None, **roles
    )
    path = folder / "config.json"
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    path.write_text(json.dumps(json.loads(path.read_text()) | ids))


def _llama(folder: Path, **roles: str) -> None:
    """A Llama that pads on the right, as published. roles: of its tokenizer's tokens."""
    zoo.llama2(folder, vocab_size=_ROWS, max_position_embeddings=_LONG)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"padding_side": "right"} | roles))


def _pythia(folder: Path) -> None:
    _modern("gpt_neox", lambda place: zoo_tokenizers.gpt_neox(place, None), folder, max_position_embeddings=_LONG)


def _gemma(folder: Path) -> None:
    def tokens(place: Path) -> None:
        zoo_tokenizers.gemma(place, zoo_templates.GEMMA2, image=False)

    _modern("gemma", tokens, folder, vocab_size=_ROWS, max_position_embeddings=_LONG)


_BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": _LONG}
_T5 = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8}
_CAUSAL, _MASKED, _PAIRS = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"
FAMILIES: tuple[tuple[str, Build], ...] = (
    (r"distilgpt2", partial(zoo.gpt2, n_positions=_LONG)),
    (r"t5|flan|mt0|bart|pegasus|opus-mt|marian", partial(_other, "t5", _PAIRS, _T5)),
    (r"bert|rbt|electra|roberta|deberta|macbert|mpnet|minilm|bge", partial(_other, "bert", _MASKED, _BERT)),
    (r"whisper|vit\b|vit-|wav2vec|clip|-vl|vlm|vision|donut|layoutlm|segformer|idefics|paligemma|detr|dino",
     lambda _: None),
    (r"qwen3[.-]5|qwen3\.5", MODERN["qwen3_5_text"]),
    (r"qwen-?3|qwen/qwen3", zoo.qwen3),
    (r"qwen.*moe|qwen1.5-moe", MODERN["qwen2_moe"]),
    (r"deepseek-r1-distill-llama|llama-?3|llama3|hermes-3", zoo.llama3),
    (r"qwen|deepseek-r1|yi-coder|opencoder", zoo.qwen2),
    (r"smollm3", MODERN["smollm3"]),
    (r"mixtral", MODERN["mixtral"]),
    (r"gemma-?3|gemma3|functiongemma|t5gemma|gemma-?4", zoo.gemma3),
    (r"gemma-2-|gemma2", zoo.gemma2),
    (r"gemma", _gemma),
    (r"phi-?[34]|phi3", zoo.phi3),
    (r"phi", MODERN["phi"]),
    (r"mistral|zephyr|openchat|ministral|nemo", zoo.mistral),
    (r"\bopt\b|opt-", partial(zoo.opt, max_position_embeddings=_LONG)),
    (r"pythia|neox|stablelm-base|dolly-v2|redpajama", _pythia),
    (r"gpt-?neo", partial(_other, "gpt_neo", _CAUSAL, {"hidden_size": 32, "num_layers": 2, "num_heads": 4,
                                                      "attention_types": [[["global", "local"], 1]],
                                                      "max_position_embeddings": _LONG})),
    (r"gpt-?j", partial(_other, "gptj", _CAUSAL, _GPT | {"rotary_dim": 4})),
    (r"gpt-?oss", MODERN["gpt_oss"]),
    (r"bloom|tigerbot", _bloom),
    (r"falcon-h1", MODERN["falcon_h1"]),
    (r"falcon-mamba", MODERN["falcon_mamba"]),
    (r"falcon", partial(_other, "falcon", _CAUSAL, {name: _BERT[name] for name in list(_BERT)[:3]})),
    (r"mpt", partial(_other, "mpt", _CAUSAL, {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": _LONG})),
    (r"starcoder2", MODERN["starcoder2"]),
    (r"starcoder|santacoder|bigcode", partial(_other, "gpt_bigcode", _CAUSAL, _GPT)),
    (r"gpt-?2|gpt|codeparrot", partial(zoo.gpt2, n_positions=_LONG)),
    (r"glm-?4|glm", MODERN["glm4"]),
    (r"granite", MODERN["granite"]),
    (r"olmo-?2", MODERN["olmo2"]),
    (r"cohere|aya|command", MODERN["cohere"]),
    (r"lfm", MODERN["lfm2"]),
    (r"hunyuan", MODERN["hunyuan_v1_dense"]),
    (r"exaone", MODERN["exaone4"]),
    (r"yuan|index|baichuan|yi-|internlm|minicpm|deepseek|tinyllama|atom", partial(_llama, pad_token="<unk>")),
    (r"smollm|llama|vicuna|alpaca|codellama|tiny|wizard|orca|solar",
     _llama),
)  # fmt: skip
"""Pattern of the id (lower case) and how its stand-in is written; a Llama stands for any other."""
_BASE = re.compile(r"smollm2?-\d+(\.\d+)?[mb]$|llama-3\.2-\db$")
"""Ids (lower case) of base models that are published without a chat template."""


class Hub:
    """The server. root: folder for the models; asked: ids that were asked for and the names of their families."""

    def __init__(self, root: Path):
        self.root, self.asked, self._lock = root, {}, threading.Lock()

    def folder(self, name: str) -> Path | None:
        """Return the model's folder, built when it is asked for first; None for a model that has no stand-in."""
        build = next((build for pattern, build in FAMILIES if re.search(pattern, name.lower())), _llama)
        folder = self.root / name.replace("/", "--")
        with self._lock:
            if not folder.exists():
                partial_ = folder.with_name("partial")
                partial_.mkdir(parents=True, exist_ok=True)
                build(partial_)
                if _BASE.search(name.lower()):
                    (partial_ / "chat_template.jinja").unlink(missing_ok=True)
                _as_published(partial_)
                partial_.rename(folder)
        return folder if folder.exists() and any(folder.iterdir()) else None


def _as_published(folder: Path) -> None:
    """Write chat template, dtype, merges and rotary positions as published models have them, which transformers 4 reads
    too."""
    tokens = folder / "tokenizer.json"
    if tokens.is_file() and (merges := (found := json.loads(tokens.read_text()))["model"].get("merges")):
        found["model"]["merges"] = [" ".join(pair) for pair in merges]
        tokens.write_text(json.dumps(found, ensure_ascii=False))
    template, path = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if template.is_file():
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template.read_text()}))
    path = folder / "config.json"
    if not path.is_file():
        return
    config = json.loads(path.read_text())
    config["torch_dtype"] = config.pop("dtype", "float32")
    rope = config.pop("rope_parameters", None) or {}
    if "full_attention" in rope:  # Gemma 3
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    own = {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    config |= own | ({"rope_scaling": rope} if rope.get("rope_type", "default") != "default" else {})
    path.write_text(json.dumps(config, indent=1))


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        size = int(self.headers["Content-Length"] or 0)
        sent = self.rfile.read(size)
        if path == "/api/whoami-v2":
            self._json({"name": "me", "orgs": [], "auth": {"accessToken": {"role": "write"}}})
        elif api := _API.fullmatch(path):
            self._api(api[1], api[2], sent)
        elif file := _FILE.fullmatch(path):
            self._file(file[1], file[2])
        else:
            self._answer(404, b"", {"X-Error-Message": "Not found"})

    do_HEAD = do_POST = do_GET

    def _found(self, name: str) -> Path | None:
        folder = None if name.startswith("datasets/") else self.server.hub.folder(name)
        if folder is None:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": f"no stand-in for {name}"})
        return folder

    def _api(self, name: str, what: str | None, sent: bytes) -> None:
        if (folder := self._found(name)) is None:
            return
        files = sorted(path for path in folder.iterdir())
        if what in (None, "revision"):
            names = [{"rfilename": path.name} for path in files]
            self._json({"id": name, "sha": _commit(folder), "siblings": names, "private": False, "tags": []})
            return
        rows = [
            {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": _digest(path)} for path in files
        ]
        if what == "paths-info":
            rows = [row for row in rows if row["path"] in sent.decode()]
        self._json(rows)

    def _file(self, name: str, path: str) -> None:
        if (folder := self._found(name)) is None:
            return
        if not (folder / path).is_file():
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
            return
        headers = {"ETag": f'"{_digest(folder / path)}"', "X-Repo-Commit": _commit(folder)}
        self._answer(200, (folder / path).read_bytes(), headers)

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


def _commit(folder: Path) -> str:
    return hashlib.sha1("".join(map(_digest, sorted(folder.iterdir()))).encode()).hexdigest()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: Hub


@contextmanager
def serve(root: Path) -> Iterator[str]:
    """Serve the hub on a free local port until the block ends; yield its address."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.hub = Hub(root)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
