"""`surefoot teach`: store a teacher's distributions at every learned token of a config's data, once for many runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

from surefoot.config.schema import RunConfig
from surefoot.data.batching.loader import Layout, all_example_batches, with_progress
from surefoot.kernels.divergence import Likeliest, Whole
from surefoot.methods.distill.served import KEY, ServedTeacher, check_server, open_model
from surefoot.methods.distill.stored import StoredFacts, Writer, write_facts
from surefoot.methods.distill.teacher import Alone, open_alone
from surefoot.methods.losses.sft import supervised_places
from surefoot.methods.table import functions_of
from surefoot.methods.waiting import silence_told
from surefoot.models.facts import facts_of
from surefoot.models.folder import resolve_folder
from surefoot.planning.fast_paths import COMPARED_AT_ONCE
from surefoot.planning.plan import TokenizerPlan
from surefoot.runs.load_models import planned_tokenizer
from surefoot.runs.revisions import pin
from surefoot.system import durable
from surefoot.system.errors import Fault, InputError
from surefoot.system.locations import is_address
from surefoot.system.posting import Server

_TOKENS = 4096  # of a forward pass, with padding


def teach(
    config: RunConfig,
    tokens: TokenizerPlan,
    out: Path,
    top: int,
    *,
    say: Callable[[str], None] = lambda line: None,
    on_progress: Callable[[str], None] = lambda line: None,
) -> StoredFacts:
    """Write the folder `out`.

    tokens: the plan of the config's tokenizer.
    top: likeliest tokens to store at each position.
    say: called with cautions.
    on_progress: called with how far it is, before every batch.

    Raises InputError where `out` exists, or the teacher or the data are not as the config needs them.
    """
    if out.exists():
        fix = "name another folder, or remove it"
        raise InputError(Fault("--out", f"{out} exists", fix, code="SF-USE-OUTPUT"))
    config, _ = pin(config, {})
    base = resolve_folder(config.model.path, config.model.revision, weights=False)
    rows = facts_of(base).vocab + tokens.added_rows
    if top >= rows:
        what = f"{top:,} is not less than the model's {rows:,} tokens"
        raise InputError(Fault("--top", what, "name fewer", code="SF-USE-FLAG"))
    tokenizer = planned_tokenizer(base, tokens)
    data = functions_of(config.stage).prepare(config, tokens, tokenizer)
    path, layout = str(config.distill.teacher), Layout(tokens.pad_id, tokens=_TOKENS)
    servers: tuple[Server, ...] = ()
    if is_address(path):
        served = open_model(config)
        servers = (served.server,)
        common = check_server(served, top, tokenizer, rows, data.train, tokens.max_length.value)
        alone = Alone(ServedTeacher(served, top, common), torch.device("cpu"), nullcontext)
    else:
        alone = open_alone(config, rows, say)
    with durable.staged_folder(out) as staging, silence_told(servers, lambda sentence, *, caution=True: say(sentence)):
        writer, words = Writer(staging), rows
        for dataset in (one for one in (data.train, data.eval) if one is not None):
            total = len(dataset)
            batches = with_progress(
                all_example_batches(dataset, layout), lambda done, of=total: on_progress(f"{done:,} of {of:,} examples")
            )
            for batch in batches:
                with torch.no_grad(), alone.context():
                    own = batch.to(alone.device)
                    known = alone.teacher(own, supervised_places(own)[0])
                    if isinstance(known, Whole):
                        words, known = known.words, likeliest(known, top, config.distill.temperature)
                    assert isinstance(known, Likeliest)
                    words = known.words or words
                    writer.add(batch, known)
        writer.flush()
        facts = StoredFacts(
            path,
            top,
            config.distill.temperature,
            words,
            data.tokenizer_sha256,
            writer.examples,
            writer.tokens,
            writer.files,
        )
        write_facts(staging, facts)
    return facts


def likeliest(known: Whole, top: int, temperature: float) -> Likeliest:
    """Return the likeliest tokens of each position. Raises InputError for a number that is not finite."""
    parts = []
    for start in range(0, known.positions, COMPARED_AT_ONCE):
        log_q = known.log_probabilities(slice(start, start + COMPARED_AT_ONCE), torch.float32, temperature)
        logprobs, tokens = log_q.topk(top)
        if not bool(logprobs.isfinite().all()):
            what = "the teacher gives log-probabilities that are not finite"
            raise InputError(Fault(KEY, what, "look at its weights with surefoot verify", code="SF-MODEL-NUMBERS"))
        parts.append((tokens, logprobs, log_q.scatter_(1, tokens, -torch.inf).logsumexp(1)))
    if not parts:
        return Likeliest(torch.zeros(0, top).long(), torch.zeros(0, top), torch.zeros(0))
    tokens, logprobs, rest = (torch.cat(one) for one in zip(*parts, strict=True))
    return Likeliest(tokens, logprobs, rest)
