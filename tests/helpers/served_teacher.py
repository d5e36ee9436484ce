"""A vLLM server with a teacher, as `surefoot.methods.distill.served` asks it, computed by transformers."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.http_stub import Stub, answering


class ServedTeacher:
    """What the server says.

    model, tokenizer: of the teacher.
    ids: how many token ids it has; others are refused.
    longest: as max_model_len.
    shift: places by which its positions are off.
    adapter: name of an adapter on it, if it has one.
    noise: added to every log-probability for each time that the same ids have been asked about before.
    """

    def __init__(self, folder: Path, *, tokenizer: Path | None = None, **how):
        self.model = AutoModelForCausalLM.from_pretrained(folder).double().eval()
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer or folder)
        self.ids, self.longest = how.get("ids", 10**6), how.get("longest", 512)
        self.shift, self.noise = how.get("shift", 0), how.get("noise", 0.0)
        self.version, self.adapter = how.get("version", "0.32.0"), how.get("adapter")
        self.asked: Counter[tuple[int, ...]] = Counter()

    @torch.no_grad()
    def prompt_logprobs(self, ids: list[int], count: int) -> list:
        log_q = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        log_q = (log_q.roll(self.shift, 0) + self.noise * self.asked[tuple(ids)]).float()
        self.asked[tuple(ids)] += 1
        places: list = [None]
        for row, token in zip(log_q[:-1], ids[1:], strict=True):
            shown = [*row.topk(count).indices.tolist()]
            shown += [] if token in shown or self.shift else [token]
            places.append({str(one): {"logprob": float(row[one]), "rank": n} for n, one in enumerate(shown, 1)})
        return places

    def reply(self, path, body):
        if path == "/v1/models":
            base = {"id": "large", "owned_by": "vllm", "max_model_len": self.longest}
            return 200, {"data": [base] + ([{"id": self.adapter, "parent": "large"}] if self.adapter else [])}
        if path == "/version":
            return 200, {"version": self.version}
        if path == "/tokenize":
            return 200, {"tokens": self.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]}
        if path == "/v1/completions":
            if max(body["prompt"]) >= self.ids:
                return 400, {"message": f"Token id {max(body['prompt'])} is out of vocabulary"}
            found = self.prompt_logprobs(body["prompt"], body["prompt_logprobs"])
            return 200, {"choices": [{"prompt_logprobs": found}]}
        return 404, {}


@contextmanager
def serving(folder: Path, **how) -> Iterator[tuple[Stub, ServedTeacher]]:
    teacher = ServedTeacher(folder, **how)
    with answering(teacher.reply) as stub:
        yield stub, teacher
