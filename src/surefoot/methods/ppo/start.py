"""PPO with its models: rollouts at the start of each cycle, the batches of every step, evaluation.

The policy is evaluated by the mean score of its greedy answers to held-out prompts. The evaluation loss is the negative
mean score, so that the lowest loss is the best policy, as in other stages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from surefoot.data.batching.loader import for_rank
from surefoot.data.batching.rollouts import Cycles, Place, PpoBatch, episode_batches, with_texts
from surefoot.methods.method import ACTOR, LoadedModels, Measured, Notify, RunInputs, Task
from surefoot.methods.policy import write_policy
from surefoot.methods.ppo.checks import (
    check_server,
    check_start,
    drawn_suffice,
    dropout_caution,
    notify_reward_accuracy,
    ratio_text,
)
from surefoot.methods.ppo.memory import Average, Limits, Numbers, PpoMemory
from surefoot.methods.ppo.rollout import Scoring, Terms, make_experience, pulled_back, to_episodes
from surefoot.methods.ppo.scores import Scores, make_scores
from surefoot.methods.ppo.task import TextBatches, cycles_of, read_texts
from surefoot.methods.rollouts import Prompts, RolloutEngine, Write, answer_seed, prompts_at, rollout_engine
from surefoot.models.generate import Decoding
from surefoot.models.modes import highest_dropout
from surefoot.models.ppo_models import PPOModels
from surefoot.models.rollout import Rollout
from surefoot.system.folders import AVERAGE, CRITIC_FOLDER
from surefoot.training.checkpoint import load_carried
from surefoot.training.report import EvalReport


def start_ppo(run: RunInputs, loaded: LoadedModels, notify: Notify) -> Task:
    """Complete the task. Raises InputError if scores are not available, EnvironmentFault if the first rollout shows
    that the models do not match."""
    config, plan, task, tokenizer = run.config, run.plan, run.task, run.tokenizer
    assert isinstance(loaded.model, PPOModels)
    ppo, engine = config.ppo, loaded.engine
    scores = make_scores(config, task.reward, tokenizer)
    texts = read_texts(config, plan, tokenizer)
    average = Average(engine.groups[ACTOR], ppo.ema) if ppo.ema is not None else None
    cycles = replace(cycles_of(config, plan, task.data), data_step=task.data_step)
    memory = PpoMemory(
        Numbers(ppo.kl, made_with={"ppo.reward": scores.identity, "ppo.unsup_data": texts.digest if texts else ""}),
        cycles,
        Limits(ppo.kl_target, ppo.kl_horizon, ppo.kl_bound, ppo.ratio_bound, ppo.patience),
        average,
        notify,
    )
    if loaded.checkpoint is None:
        notify_reward_accuracy(run, loaded, notify)
    else:
        memory.restore(loaded.state.step, loaded.state.stage, load_carried(loaded.checkpoint))
    if sentence := dropout_caution(highest_dropout(loaded.policy)):
        notify(sentence)
    answering = rollout_engine(config, plan, loaded)
    cycle = _Cycle(run, loaded, cycles, memory, answering, scores, texts, notify)

    def write(folder: Path) -> None:
        tokenizer.save_pretrained(folder / CRITIC_FOLDER)
        if average is not None:
            with average.in_place():
                write_policy(loaded.policy, plan, folder / AVERAGE)
            tokenizer.save_pretrained(folder / AVERAGE)

    held_out = task.data.eval

    def evaluate(step: int, give_up: Callable[[], bool]) -> Measured | None:
        assert held_out is not None
        answering.follow()
        prompts = prompts_at(held_out, range(len(held_out)))
        return evaluate_answers(step, prompts, cycle.greedy, cycle.scoring, tokenizer, give_up)

    measured = None if held_out is None else evaluate
    servers = (*answering.servers, *scores.servers)
    return replace(task, ready=cycle.ready, memory=memory, write=write, evaluate=measured, servers=servers)


@dataclass(frozen=True)
class _Cycle:
    """Provides the steps of a cycle with batches."""

    run: RunInputs
    loaded: LoadedModels
    cycles: Cycles
    memory: PpoMemory
    engine: RolloutEngine
    scores: Scores
    texts: TextBatches | None
    notify: Notify

    def ready(self, step: int, prompts: Sequence[object]) -> list[PpoBatch]:
        """Return this rank's micro-batches of the step. The given prompts are ignored: they follow from the step."""
        place = self.cycles.place(step)
        if place.begins:
            self._roll_out(step, place)
        chosen = {int(one): order for order, one in enumerate(self.cycles.episodes(self.run.config.seed, place))}
        episodes = [one for one in self.memory.episodes if one.place in chosen]
        episodes.sort(key=lambda one: chosen[one.place])
        batches = episode_batches(episodes, self.run.plan.batch.micro.value, self.run.plan.tokenizer.pad_id)
        if self.texts is not None and batches:
            batches = with_texts(batches, self.texts.of_step(self.cycles.data_step(step), len(batches)))
        return list(for_rank(batches, self.loaded.engine.rank, self.loaded.engine.world))

    def greedy(self, prompts: Sequence[tuple[int, ...]], places: Sequence[int]) -> Sequence[Rollout]:
        return self._answer(prompts, places, temperature=0.0)

    @property
    def scoring(self) -> Scoring:
        settings, engine = self.loaded.settings, self.loaded.engine
        models = self.loaded.model
        assert isinstance(models, PPOModels)
        return Scoring(
            models=models,
            score=self.scores.score,
            take_drawn=False,
            pad_id=self.run.plan.tokenizer.pad_id,
            micro=self.run.plan.batch.micro.value,
            kernels=settings.kernels,
            forward=settings.forward,
            device=engine.device,
            rank=engine.rank,
            world=engine.world,
            totals=engine.totals,
        )

    def _roll_out(self, step: int, place: Place) -> None:
        ppo = self.run.config.ppo
        prompts = prompts_at(self.run.task.data.train, self.cycles.prompts(self.run.config.seed, place.rollout))
        seed = answer_seed(self.run.config.seed, place.rollout)

        def write(prompts: Sequence[tuple[int, ...]], places: Sequence[int]) -> Sequence[Rollout]:
            return self._answer(prompts, places, temperature=ppo.temperature, top_p=ppo.top_p, seed=seed)

        self.engine.follow()
        scoring = replace(self.scoring, take_drawn=self.memory.numbers.take_drawn)
        experience = make_experience(prompts, write, scoring, ppo.temperature)
        if step == 1:
            compute = self.run.plan.precision.compute.value
            known = (experience.real, experience.logprobs, experience.reference, experience.drawn)
            kl, ratio = check_start("ppo", *known, compute)
            said = f"KL {kl:.2g} per token from the reference, {ratio_text(ratio)}"
            self.notify(f"before the first update: {said}", caution=False)
            # Not for a server, which may fall behind the weights later; in this process they are the trained ones.
            seen = (experience.real, experience.logprobs, experience.drawn)
            if ppo.engine == "embedded" and drawn_suffice(*seen, compute):
                self.memory.take_drawn()
        elif ppo.engine != "embedded":
            seen = (experience.real, experience.logprobs, experience.drawn)
            check_server("ppo", *seen, self.run.plan.precision.compute.value)
        terms = Terms(ppo.reward_clip, ppo.gamma, ppo.gae_lambda, ppo.whiten)
        kl = self.memory.numbers.kl_coef
        penalty = partial(pulled_back, prompts, experience, terms, kl=kl)
        self.memory.begin(step, *to_episodes(prompts, experience, terms, kl=kl), penalty)

    def _answer(
        self,
        prompts: Sequence[tuple[int, ...]],
        places: Sequence[int],
        *,
        temperature: float,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Sequence[Rollout]:
        models, tokens, most = self.loaded.model, self.run.plan.tokenizer, self.run.config.ppo.max_new_tokens
        assert isinstance(models, PPOModels)
        decoding = Decoding(most, frozenset(tokens.stop.value), tokens.pad_id, temperature, top_p, seed)
        with models.actor_inference():
            return self.engine.rollouts.answer(prompts, decoding, places)


def evaluate_answers(
    step: int,
    prompts: Prompts,
    write: Write,
    how: Scoring,
    tokenizer: PreTrainedTokenizerBase,
    give_up: Callable[[], bool],
) -> Measured | None:
    """Evaluate the policy by the scores of its answers to held-out prompts.

    write: generates greedily. All answers are generated and scored at once; a signal is only checked before.
    """
    if give_up():
        return None
    started = time.perf_counter()
    experience = make_experience(prompts, write, how, temperature=1.0)
    scores, lengths = experience.scores.double(), experience.lengths.double()
    known = scores.isfinite()
    reward = float(scores[known].mean()) if known.any() else float("nan")
    kl = (experience.logprobs - experience.reference).where(experience.real, 0.0).sum(dim=1).double().mean()
    report = EvalReport(
        step=step,
        loss=-reward,
        perplexity=None,
        accuracy=None,
        weight=int(lengths.sum()),
        seconds=time.perf_counter() - started,
        metrics={
            "reward": reward,
            "kl": float(kl),
            "response_length": float(lengths.mean()),
            "ended": sum(answer.stopped for answer in experience.answers) / len(experience.answers),
        },
        unit="response_tokens",
    )
    samples = [
        (str(tokenizer.decode(list(one.prompt))), str(tokenizer.decode(list(one.response), skip_special_tokens=True)))
        for one in experience.answers
    ]
    return Measured(report, samples)
