"""`surefoot verify --served` against stubs that speak as vLLM, SGLang, llama.cpp and others do, with PEFT's numbers.

`make served` does the same with a real vLLM.
"""

import json
import math
from contextlib import contextmanager

import pytest
import torch
from click.testing import CliRunner
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.http_stub import answering
from helpers.trained_runs import heron_folder, heron_trained
from surefoot.commands.main import main
from surefoot.evaluate.served import FP32

KINDS = ("vllm", "sglang", "llamacpp", "somebody")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A LoRA run that moved far from its base, with records of its own held out."""
    root = heron_folder(tmp_path_factory.mktemp("served"))
    held = [{"instruction": f"Say {n} loudly.", "output": "heron " * n} for n in (2, 5)]
    (root / "held.json").write_text(json.dumps(held))
    data = {"train": str(root / "train.json"), "eval": str(root / "held.json"), "max_length": 128, "template": "llama3"}
    heron_trained(root, "run", data=data, optim={"lr": 0.02}, duration="4 epochs")
    return root


LONGEST_HERE = 41  # tokens of a prompt and its answer that the servers take


class Engine:
    """What a server computes: by transformers and PEFT, one text at a time.

    serves: trained, base or scaled, the adapter at another strength.
    """

    def __init__(self, place, serves="trained", dtype=torch.float32):
        model = AutoModelForCausalLM.from_pretrained(place / "base", dtype=torch.float32)
        if serves != "base":
            model = PeftModel.from_pretrained(model, place / "run")
        for module in model.modules():
            if serves == "scaled" and isinstance(module, LoraLayer):
                module.scaling["default"] *= 0.7
        self.model = model.to(dtype).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(place / "run")
        self.stops = {self.tokenizer.convert_tokens_to_ids(one) for one in ("<|eot_id|>", "<|end_of_text|>")}
        self.chat = self.tokenizer.chat_template

    @torch.no_grad()
    def logprobs(self, ids: list[int]) -> list[float]:
        assert len(ids) < LONGEST_HERE
        logits = self.model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
        return logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()

    def rendered(self, turns) -> str:
        return self.tokenizer.apply_chat_template(
            turns, chat_template=self.chat, tokenize=False, add_generation_prompt=True
        )

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def finish(self, body) -> str:
        (token,) = map(int, body["logit_bias"])
        return "stop" if token in self.stops else "length"


def spoken(engine: Engine, kind: str):
    """The server's answer to a path and a body."""
    base = {"id": "base", "owned_by": kind, "parent": None, "max_model_len": LONGEST_HERE}
    models = [base, {"id": "run", "owned_by": kind, "parent": "base"}]

    def answer(path, body):
        if path == "/v1/models":
            return 200, {"data": models[:1] if kind == "llamacpp" else models}
        if path == "/v1/completions" and "logit_bias" in body:
            return 200, {"choices": [{"finish_reason": engine.finish(body)}]}
        if path == "/v1/completions" and kind == "vllm":
            ids = body["prompt"]
            of_prompt = [{str(t): {"logprob": p}} for t, p in zip(ids[1:], engine.logprobs(ids), strict=True)]
            return 200, {"choices": [{"prompt_logprobs": [None, *of_prompt]}]}
        if path == "/v1/completions" and body.get("echo"):
            found = [None, *engine.logprobs(body["prompt"]), -1.0]
            return 200, {"choices": [{"logprobs": {"token_logprobs": found}}]}
        if path == "/generate" and body.get("lora_path") == "run":
            ids = body["input_ids"]
            found = [[p, t, None] for p, t in zip([None, *engine.logprobs(ids)], ids, strict=True)]
            return 200, {"meta_info": {"input_token_logprobs": found}}
        if path == "/completion":
            ((token, _),) = body["logit_bias"]
            return 200, {
                "completion_probabilities": [{"id": token, "logprob": engine.logprobs([*body["prompt"], token])[-1]}]
            }
        if path == "/tokenize" and kind == "vllm":
            return 200, {"tokens": engine.tokens(engine.rendered(body["messages"]))}
        if path == "/apply-template":
            return 200, {"prompt": engine.rendered(body["messages"])}
        if path == "/tokenize":
            return 200, {"tokens": engine.tokens(body["content"])}
        if path == "/v1/chat/completions" and engine.chat:
            return 200, {"usage": {"prompt_tokens": len(engine.tokens(engine.rendered(body["messages"])))}}
        return 404, {"error": path}

    return answer


@contextmanager
def serving(engine: Engine, kind: str = "vllm"):
    with answering(spoken(engine, kind)) as stub:
        yield stub.address


def verified(place, address, *more, folder="run"):
    """Exit code, findings, and the codes of the faults."""
    words = ["verify", str(place / folder), "--served", address, "--json", *more]
    result = CliRunner().invoke(main, words)
    codes = [line.rpartition("[")[2].rstrip("]") for line in result.stderr.splitlines() if "[SF-" in line]
    return result.exit_code, json.loads(result.stdout) if result.stdout.strip() else None, codes


@pytest.mark.parametrize("kind", KINDS)
def test_the_trained_model_behind_each_server(place, kind):
    with serving(Engine(place), kind) as address:
        code, found, codes = verified(place, address)
    assert (code, codes, found["verdict"], found["within"], found["kind"]) == (0, [], "trained", "fp32", kind)
    assert found["from_trained"]["largest"] <= FP32 < found["effect"]["mean"]
    assert found["strength"] == pytest.approx(1, abs=1e-4)
    assert found["texts"] == 2
    assert [one["same"] for one in found["dialogues"]] == [True, True]
    assert list(found["stops"].values()) == [True]


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_does_not_apply_the_adapter(place, kind):
    with serving(Engine(place, "base"), kind) as address:
        code, found, codes = verified(place, address)
    assert (code, codes, found["verdict"]) == (4, ["SF-SERVED-BASE"], "base")
    assert found["strength"] == pytest.approx(0, abs=1e-4)
    assert found["from_base"]["largest"] <= FP32


def test_an_adapter_at_another_strength_is_neither(place):
    with serving(Engine(place, "scaled")) as address:
        code, found, codes = verified(place, address)
    assert (code, codes, found["verdict"]) == (4, ["SF-SERVED-OTHER"], "neither")
    first = found["first"]
    assert abs(first["served"] - first["trained"]) > found["limit"] > FP32
    assert (first["text"] >= 1, first["token"] >= 1) == (True, True)
    assert found["strength"] < 0.99


def test_a_server_that_computes_in_bf16(place):
    with serving(Engine(place, dtype=torch.bfloat16)) as address:
        code, found, codes = verified(place, address)
        strict = verified(place, address, "--threshold", "1e-4")
    assert (code, codes, found["verdict"], found["within"]) == (0, [], "trained", "rounding to bf16")
    assert FP32 < found["from_trained"]["largest"] <= found["limit"]
    assert (strict[0], strict[2]) == (4, ["SF-SERVED-OTHER"])


def test_what_training_hardly_changed_cannot_be_told_apart(place):
    with serving(Engine(place)) as address:
        code, _, codes = verified(place, address, "--threshold", "100")
    assert (code, codes) == (4, ["SF-SERVED-UNDECIDED"])


@pytest.mark.parametrize("kind", KINDS)
def test_another_chat_template_and_no_stop_token(place, kind):
    engine = Engine(place)
    engine.chat = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    engine.stops = set()
    with serving(engine, kind) as address:
        code, found, codes = verified(place, address)
    assert (code, codes, found["verdict"]) == (4, ["SF-SERVED-TEMPLATE"] * 2 + ["SF-SERVED-STOP"], "trained")
    assert [one["same"] for one in found["dialogues"]] == [False, False]
    assert list(found["stops"].values()) == [False]


def test_a_server_without_chat_says_nothing_of_dialogues(place):
    engine = Engine(place)
    engine.chat = None
    with serving(engine, "somebody") as address:
        code, found, _ = verified(place, address)
    assert (code, [one["same"] for one in found["dialogues"]]) == (0, [None, None])


def test_texts_of_ones_own(place):
    rows = [{"instruction": "Sing.", "output": "heron"}, {"instruction": "Hum.", "output": "heron heron"}]
    (place / "own.json").write_text(json.dumps(rows))
    with serving(Engine(place)) as address:
        code, found, _ = verified(place, address, "--data", str(place / "own.json"), "--max-samples", "1")
    assert (code, found["texts"], found["source"]) == (0, 1, str(place / "own.json"))


def test_a_merged_export_has_no_base_to_be_compared_with(place):
    out = place / "merged"
    made = CliRunner().invoke(main, ["export", str(place / "run"), "--merge", "--out", str(out)])
    assert made.exit_code == 0, made.output
    with serving(Engine(place)) as address:
        code, found, _ = verified(place, address, folder="merged")
    assert (code, found["verdict"], found["from_base"], found["strength"]) == (0, "trained", None, None)
    with serving(Engine(place, "base")) as address:
        assert verified(place, address, folder="merged")[2] == ["SF-SERVED-OTHER"]


def test_a_run_of_all_weights_is_compared_with_what_it_began_with(place):
    heron_trained(place, "full", adapter=None, optim={"lr": 1e-3})
    with serving(Engine(place, "base")) as address:
        code, found, codes = verified(place, address, folder="full")
    assert (code, found["verdict"], codes[0]) == (4, "base", "SF-SERVED-BASE")


@pytest.mark.parametrize(
    ("words", "code"),
    [(["--name", "nobody"], "SF-USE-FLAG"), (["--data", "missing.json"], "SF-FILE-MISSING")],
)
def test_wrong_words(place, words, code):
    with serving(Engine(place)) as address:
        result = verified(place, address, *words)
    assert (result[0], result[2]) == (2, [code])


def test_a_server_that_answers_otherwise(place):
    def answer(path, body):
        return spoken(engine, "vllm")(path, body) if path == "/v1/models" else (200, {"choices": [{}]})

    engine = Engine(place)
    with answering(answer) as stub:
        assert verified(place, stub.address)[::2] == (3, ["SF-SERVER"])
    spoilt = Engine(place)
    spoilt.logprobs = lambda ids: [math.nan] * (len(ids) - 1)
    with serving(spoilt, "somebody") as address:
        assert verified(place, address)[::2] == (3, ["SF-SERVER"])
