"""The facts of a run that another tool's log lines are made of."""

from __future__ import annotations

from torch import nn

from surefoot.interop.tools import voice_of
from surefoot.interop.translation import Translation
from surefoot.interop.voice import SILENT, End, RunFacts, Voice
from surefoot.models.forward import causal_model
from surefoot.runs.prepared import Prepared
from surefoot.runs.publish import Published
from surefoot.runs.setup import Setup


def find_voice(origin: Translation | None) -> Voice:
    return SILENT if origin is None else voice_of(origin)


def run_facts(run: Prepared, setup: Setup) -> RunFacts:
    plan, example = run.plan, run.stage.data.train[0]
    ids, learned = tuple(example.ids.tolist()), tuple(example.supervised.tolist())
    answer = [token for token, counts in zip(ids, learned, strict=True) if counts]
    return RunFacts(
        config=run.config,
        embedding=_embedding_name(setup.policy),
        bos=plan.tokenizer.bos_id,
        pad=plan.tokenizer.pad_token.value,
        pad_id=plan.tokenizer.pad_id,
        added_rows=plan.tokenizer.added_rows,
        base=plan.precision.base.value,
        compute=plan.precision.compute.value,
        attention=plan.attention.implementation.value,
        device=plan.device.value,
        ids=ids,
        learned=learned,
        text=str(run.tokenizer.decode(list(ids))),
        answer=str(run.tokenizer.decode(answer)),
    )


def end_facts(run: Prepared, published: Published) -> End:
    folder = run.folder
    return End(str(folder), frozenset(path.name for path in folder.iterdir()), published.results)


def _embedding_name(model: nn.Module) -> str:
    wanted = causal_model(model).get_input_embeddings()
    return next((name for name, module in model.named_modules() if module is wanted), "")
