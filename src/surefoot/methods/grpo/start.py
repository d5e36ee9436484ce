"""GRPO with its models: rollouts at the start of each cycle, the batches of every step, evaluation.

The policy is evaluated by the mean score of its greedy answers to held-out prompts. The evaluation loss is the negative
mean score, so that the lowest loss is the best policy, as in other stages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from surefoot.data.batching.groups import GroupBatch, GroupEpisode, group_batches
from surefoot.data.batching.loader import for_rank
from surefoot.data.batching.order import CONTROL, uniform
from surefoot.data.batching.rollouts import Cycles, Place
from surefoot.methods.environments.recorded import Recorded
from surefoot.methods.examples import whole_layout
from surefoot.methods.grpo.alongside import Alongside
from surefoot.methods.grpo.answering import Answering, DrawnAnswers, evaluate_answers
from surefoot.methods.grpo.memory import GroupMemory, Numbers, RolloutStatistics
from surefoot.methods.grpo.reward_models import open_reward_models
from surefoot.methods.grpo.rollout import (
    GroupRollout,
    Passes,
    Terms,
    compute_logprobs,
    flat_groups,
    to_episodes,
    with_groups,
    with_penalty,
)
from surefoot.methods.grpo.task import correction_of, cycles_of, loss_facts
from surefoot.methods.grpo.turns import environment_reward, named_environment, open_multi_turn, turn_marks
from surefoot.methods.method import LoadedModels, Measured, Notify, RunInputs, Task
from surefoot.methods.ppo.checks import START_TOLERANCE, check_start, drawn_suffice, dropout_caution, ratio_text
from surefoot.methods.reference import ReferenceModel, open_reference_model
from surefoot.methods.rewards.terms import open_rewards, passed_reward
from surefoot.methods.rollouts import Prompts, RolloutEngine, answer_seed, prompts_at, rollout_engine
from surefoot.methods.waiting import WaitReporter
from surefoot.models.modes import highest_dropout
from surefoot.system.errors import Diverged, EnvironmentFault, Fault
from surefoot.training.checkpoint import load_carried
from surefoot.training.report import EvalReport


def start_grpo(run: RunInputs, loaded: LoadedModels, notify: Notify) -> Task:
    """Complete the task. Raises InputError if scores are not available, EnvironmentFault if the first rollout shows
    that engine and training code have different distributions."""
    config, task = run.config, run.task
    rewards = open_rewards(config.grpo.rewards)
    if task.reward is not None:
        rewards = (*rewards, passed_reward(task.reward))
    cycles = replace(cycles_of(config, run.plan, task.data), data_step=task.data_step)
    made_with = {
        "grpo.rewards": "; ".join(one.identity for one in rewards),
        "data.train": task.data.train.records_digest(),
    }
    environment = named_environment(config)
    if environment is not None and config.grpo.environment is not None:
        made_with["grpo.environment"] = environment.identity
        rewards = (environment_reward(environment, config.grpo.environment.weight), *rewards)
    engine = rollout_engine(config, run.plan, loaded)
    task = replace(task, servers=(*engine.servers, *(server for one in rewards for server in one.servers)))
    alongside: Alongside[tuple[int, int, DrawnAnswers]] = Alongside(loaded.model, engine.follow, task.give_up)
    memory = GroupMemory(Numbers(made_with=made_with), cycles, config.grpo.patience, notify, alongside)
    if loaded.checkpoint is not None:
        memory.restore(loaded.state.step, loaded.state.stage, load_carried(loaded.checkpoint))
    if sentence := dropout_caution(highest_dropout(loaded.policy)):
        notify(sentence)
    reference = open_reference_model(run, loaded) if config.needs_reference else None
    waits, totals, multi_turn = WaitReporter(notify), loaded.engine.totals, None
    if environment is not None:
        marks = turn_marks(config, run.plan.tokenizer, run.tokenizer, task.data, environment.role)
        since = min([loaded.state.step, *(step for step, _ in alongside.asked)])
        recorded = Recorded(Path(config.output), loaded.engine.rank, since)
        multi_turn = open_multi_turn(config, environment, marks, run.tokenizer, recorded, totals, waits, notify)
    answering = Answering(
        rollouts=engine.rollouts,
        multi_turn=multi_turn,
        rewards=rewards,
        reward_models=open_reward_models(run, loaded),
        tokenizer=run.tokenizer,
        tokens=run.plan.tokenizer,
        limit=config.grpo.max_new_tokens,
        passes=Passes(
            layout=whole_layout(run.plan, task.data),
            processor=task.data.train.processor,
            kernels=loaded.settings.kernels,
            forward=loaded.settings.forward,
            device=loaded.engine.device,
            rank=loaded.engine.rank,
            world=loaded.engine.world,
            totals=totals,
        ),
        waits=waits,
    )
    cycle = _Cycle(run, loaded, cycles, memory, engine, answering, reference, notify, alongside)
    evaluate = None if task.data.eval is None else cycle.evaluate
    ends = {"check_end": memory.check_end, "close": alongside.close}
    return replace(task, ready=cycle.ready, memory=memory, evaluate=evaluate, **ends)


@dataclass(frozen=True)
class _Cycle:
    """Provides the steps of a cycle with batches."""

    run: RunInputs
    loaded: LoadedModels
    cycles: Cycles
    memory: GroupMemory
    engine: RolloutEngine
    answering: Answering
    reference: ReferenceModel | None
    notify: Notify
    alongside: Alongside[tuple[int, int, DrawnAnswers]]

    def ready(self, step: int, prompts: Sequence[object]) -> list[GroupBatch]:
        """Return this rank's micro-batches of the step. The given prompts are ignored: they follow from the step."""
        place, plan = self.cycles.place(step), self.run.plan
        self.alongside.resume(self._first)
        if place.begins:
            self._roll_out(step, place)
        order = {int(one): rank for rank, one in enumerate(self.cycles.episodes(self.run.config.seed, place))}
        episodes = sorted(
            (one for one in self.memory.episodes if one.place in order), key=lambda one: (order[one.place], one.member)
        )
        of_tokens, data = loss_facts(self.run.config).mean == "tokens", self.run.task.data
        batches = group_batches(episodes, whole_layout(plan, data), of_tokens=of_tokens, data=data.train)
        return list(for_rank(batches, self.loaded.engine.rank, self.loaded.engine.world))

    def evaluate(self, step: int, give_up: Callable[[], bool]) -> Measured | None:
        """Evaluate the answers to the held-out prompts. All are generated and scored at once; a signal is only checked
        before."""
        self.alongside.resume(self._first)
        if give_up() or not self.alongside.arrived(give_up):
            return None
        started = time.perf_counter()
        data, config = self.run.task.data.eval, self.run.config
        assert data is not None
        grpo = config.grpo
        self.settle()
        self.engine.follow()
        found = evaluate_answers(
            self.answering, step, data, count=grpo.eval_answers, temperature=grpo.temperature, seed=config.seed
        )
        metrics = found.metrics(grpo.eval_passes)
        report = EvalReport(
            step=step,
            loss=-metrics["reward"],
            perplexity=None,
            accuracy=None,
            weight=int(found.greedy.lengths.sum()),
            seconds=time.perf_counter() - started,
            metrics=metrics,
            unit="response_tokens",
        )
        decode = self.run.tokenizer.decode
        samples = [
            (data.with_facts(place, str(decode(list(asked)))), str(decode(list(response), skip_special_tokens=True)))
            for place, (asked, response) in enumerate((one.prompt, one.response) for one in found.greedy.answers)
        ]
        return Measured(report, samples)

    def _roll_out(self, step: int, place: Place) -> None:
        """Generate the missing rollouts up to those in advance, in order, with the current weights."""
        last = self.cycles.place(self.run.total_steps).rollout
        wanted = range(place.rollout, max(place.rollout, min(place.rollout + self.run.config.grpo.ahead, last)) + 1)
        self.settle()
        self.memory.keep(wanted)
        missing = [number for number in wanted if number not in self.memory.ahead]
        # Once for all: rollouts that are made ahead are drawn with these weights too.
        if missing:
            self.engine.follow()
        later = [number for number in missing if number > place.rollout and self.engine.alongside]
        for number in missing[: len(missing) - len(later)]:
            self.memory.ahead[number] = self._make(*self._first(step, number))
        if later:
            self.alongside.begin([(step, number) for number in later], self._first)
        try:
            self.memory.begin(step, *self.memory.ahead.pop(place.rollout))
        except Diverged:
            if (
                self.answering.multi_turn is not None
            ):  # with too many lost answers, whose cause may be removed before a resume
                self.answering.multi_turn.recorded.ask_again(step)
            raise

    def settle(self) -> None:
        """Wait for rollouts that a server draws alongside, and make their episodes, before the server gets other
        weights."""
        with self.alongside.taken() as drawn:
            for step, number, answers in drawn:
                self.memory.ahead[number] = self._make(step, number, answers)
                self.alongside.made(step, number)

    def _first(self, step: int, number: int) -> tuple[int, int, DrawnAnswers]:
        """Draw answers to the own prompts of rollout `number`, at step `step`."""
        where = [int(one) for one in self.cycles.prompts(self.run.config.seed, number)]
        return step, number, self._draw(step, number, where)

    def _make(
        self, step: int, number: int, answers: DrawnAnswers
    ) -> tuple[tuple[GroupEpisode, ...], RolloutStatistics]:
        """Make the episodes of rollout `number` from the answers to its own prompts, drawn at step `step`, by the
        weights that drew them. The answers are kept when all are there, not before: if a server's requests are given
        up, a resumed run asks for all of them again."""
        config = self.run.config
        grpo = config.grpo
        where = list(answers.prompts.where[:: grpo.group])
        rollout, lines = self._score(step, number, answers)
        drawn = [rollout]
        for attempt in range(1, grpo.redraw + 1):
            flat = flat_groups(rollout, grpo.group).nonzero().flatten().tolist()
            if not flat:
                break
            others = self.cycles.others(config.seed, number, attempt, len(flat)).tolist()
            more, new = self._score(step, number, self._draw(step, number, others, attempt), attempt)
            drawn, lines = [*drawn, more], [*lines, *new]
            rollout = with_groups(rollout, flat, more, grpo.group)
            for group, other in zip(flat, others, strict=True):
                where[group] = other
        self.run.task.keep(lines)
        prompts = self._prompts(where)
        logprobs, reference = self._logprobs(step, rollout, prompts)
        facts = loss_facts(config)
        terms = Terms(
            facts,
            grpo.group,
            grpo.kl if facts.penalty == "score" else 0.0,
            grpo.overlong == "mask",
            None if grpo.correction == "none" or self.memory.numbers.take_drawn else correction_of(config),
        )
        episodes, figures = to_episodes(prompts, rollout, logprobs, reference, terms, drawn)
        self._hold_mismatch(step, figures.metrics.get("mismatch"))
        return episodes, figures

    def _hold_mismatch(self, step: int, found: float | None) -> None:
        """Raise Diverged, or show a caution, if engine and training code differ by more than the config allows."""
        grpo = self.run.config.grpo
        bound = grpo.mismatch_bound
        if bound == "auto":
            bound = START_TOLERANCE[self.run.plan.precision.compute.value]
        if found is None or bound is None or found <= bound:
            return
        what = (
            f"the engine that draws answers finds their tokens {found:.3g} nats more or less likely than the code that "
            f"learns, in the mean; grpo.mismatch_bound is {bound:g}"
        )
        fix = "see that it serves these weights in this type, set grpo.correction, or raise the bound"
        if grpo.mismatch == "stop":
            raise Diverged(Fault(f"step {step}", what, fix, code="SF-GRPO-MISMATCH"))
        self.notify(f"caution: step {step}: {what}; {fix}")

    def _prompts(self, where: Sequence[int]) -> Prompts:
        """Return the prompts, each repeated for its answers."""
        return prompts_at(self.run.task.data.train, [one for one in where for _ in range(self.run.config.grpo.group)])

    def _draw(self, step: int, number: int, where: Sequence[int], attempt: int = 0) -> DrawnAnswers:
        """Generate answers to prompts of rollout `number`, at step `step`.

        attempt: from 1 on for prompts that replace others.
        """
        config = self.run.config
        grpo = config.grpo
        return self.answering.draw(
            step,
            self.run.task.data.train,
            [one for one in where for _ in range(grpo.group)],
            temperature=grpo.temperature,
            top_p=grpo.top_p,
            top_k=grpo.top_k or 0,
            seed=answer_seed(config.seed, number, attempt),
            needed=not attempt,
            group=grpo.group if grpo.engine == "vllm" else 0,
        )

    def _score(
        self, step: int, number: int, answers: DrawnAnswers, attempt: int = 0
    ) -> tuple[GroupRollout, list[dict[str, Any]]]:
        """Score what `_draw` has drawn; also return each answer's record for the run folder."""
        config = self.run.config
        grpo = config.grpo
        rollout, kept = self.answering.score(self.run.task.data.train, answers)
        if grpo.correction != "none" and bool((rollout.drawn.isnan() & rollout.real).any()):
            what = "corrects by log-probabilities of the engine that draws, which does not tell them"
            fix = "start vLLM with --logprobs-mode processed_logprobs, or leave it out"
            raise EnvironmentFault(Fault("grpo.correction", what, fix, code="SF-SERVER"))
        if grpo.overlong == "penalise":
            buffer = grpo.overlong_buffer or max(1, grpo.max_new_tokens // 5)
            rollout = with_penalty(rollout, grpo.max_new_tokens, buffer)
        if grpo.control == "random":
            numbers = torch.from_numpy(uniform(config.seed, (CONTROL, number, attempt), len(rollout.answers)))
            rollout = replace(rollout, learned=numbers.where(rollout.scores.isfinite(), torch.nan))
        again = {"attempt": attempt} if attempt else {}
        return rollout, [
            {"step": step, "group": place // grpo.group, "member": place % grpo.group, **again, **one}
            for place, one in enumerate(kept)
        ]

    def _logprobs(self, step: int, rollout: GroupRollout, prompts: Prompts) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute log-probabilities of policy and reference; before the first update compare them and the engine's."""
        grpo, compute = self.run.config.grpo, self.run.plan.precision.compute.value
        take_drawn = self.memory.numbers.take_drawn
        policy = None if take_drawn else self.loaded.model
        logprobs, reference = compute_logprobs(
            rollout, prompts.pictures, self.answering.passes, grpo.temperature, policy, self.reference
        )
        if step == 1 and not take_drawn:
            known = reference if reference is not None else logprobs
            _, ratio = check_start("grpo", rollout.real, logprobs, known, rollout.drawn, compute)
            self.notify(f"before the first update: {ratio_text(ratio)}", caution=False)
            # Not for a server, which may fall behind the weights later; in this process they are the trained ones.
            if grpo.engine == "embedded" and drawn_suffice(rollout.real, logprobs, rollout.drawn, compute):
                self.memory.take_drawn()
        return logprobs, reference
