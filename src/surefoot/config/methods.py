"""The knobs of single methods: reward, dpo and kto, ppo, grpo. `surefoot.config.schema` has those of every run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_serializer

from surefoot.config.sections import AdapterShape, Sources, plain_sources
from surefoot.config.types import Count, Flag, NonNegative, Number, OwnFunction, Positive, Section, ShortForm, Text
from surefoot.method_facts.losses import GROUP_LOSSES, PAIR_LOSSES, REWARD_LOSSES, CorrectionKind

if TYPE_CHECKING:
    PairLoss = str
    RewardLoss = str
    GroupLoss = str
else:  # the rows are the one list of names; a type checker wants constants
    PairLoss = Literal[tuple(PAIR_LOSSES)]
    RewardLoss = Literal[tuple(REWARD_LOSSES)]
    GroupLoss = Literal[tuple(GROUP_LOSSES)]


class RewardConfig(Section):
    loss: RewardLoss | OwnFunction = "last"
    """Which scores of a pair are compared. last: those at the last token of each answer. divergence: the mean over all
    positions from the first token in which the answers differ, as DeepSpeed-Chat does. FILE.py:FUNCTION,
    MODULE:FUNCTION or entry_point:NAME: a loss of your own, pairs -> the loss of each pair."""
    num_padding_at_beginning: Annotated[Literal["auto"] | Annotated[int, Field(ge=0), Number], Field(examples=[1])] = (
        "auto"
    )
    """divergence only: how many PAD tokens every sequence begins with. auto: 1 where the tokenizer begins a text with
    its PAD, as OPT's does, else 0."""
    center: NonNegative = 0.0
    """Coefficient of the squared sum of both scores, which keeps scores around 0 (Eisenstein et al. 2023); 0: none."""
    init: Annotated[Text | None, Field(examples=["runs/reward"])] = None
    """A reward model whose value head this run starts from; null: a head of zeros."""


class AlignmentConfig(Section):
    loss: PairLoss | OwnFunction = "sigmoid"
    """dpo only. sigmoid: DPO (Rafailov et al. 2023). ipo: Azar et al. 2023. hinge: Zhao et al. 2023 (SLiC). orpo: Hong
    et al. 2024. simpo: Meng et al. 2024. cpo: Xu et al. 2024. FILE.py:FUNCTION, MODULE:FUNCTION or
    entry_point:NAME: a loss of your own, (pairs, constants) -> the loss of each pair. Without a reference: orpo, simpo
    and cpo."""
    beta: Positive = 0.1
    """How strongly the policy is held to the reference; orpo: weight of the odds ratio; simpo, cpo: scale of
    the reward."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), Number] = 0.0
    """sigmoid and cpo only: share of pairs that are taken to be the wrong way round (conservative DPO)."""
    margin: NonNegative = 0.5
    """simpo only: by how much the better answer's reward should be higher, gamma in the paper."""
    sft: NonNegative = 0.0
    """dpo only: weight of the cross entropy of the better answers, added to the loss. At 1 by definition: orpo and
    cpo."""
    good: NonNegative = 1.0
    """kto only: weight of good answers."""
    bad: NonNegative = 1.0
    """kto only: weight of bad answers."""
    reference: Annotated[Text, Field(examples=["cached"])] = "auto"
    """The policy to stay close to. auto: adapter-off with an adapter, else model. adapter-off: the base under the
    adapter. model: a second copy of the base. cached: log-probabilities of the base, computed once before step 1.
    none: for a loss of your own that needs no reference. Anything else: folder or hub id of another model with the
    same tokenizer."""


class PpoConfig(Section):
    reward: Annotated[Text | None, Field(examples=["runs/reward"])] = None
    """Where scores come from: a reward model's folder or hub id; FILE.py:FUNCTION, called with prompts and responses
    (lists of texts) and returning a number for each; or an http(s) address, which is sent the same as JSON. A Python
    caller may pass a function instead."""
    critic: Annotated[Text | None, Field(examples=["runs/reward"])] = None
    """Model that the critic starts from; null: the reward model where there is one, else the policy."""
    critic_adapter: Annotated[
        Literal["as_policy", "none"] | AdapterShape, Field(examples=[{"kind": "lora", "rank": 8}])
    ] = "as_policy"
    """What of the critic trains beside its value head. as_policy: an adapter like the policy's, or all weights where
    the policy has none. none: all weights. Or an adapter of its own, with keys as in `adapter`. A critic that starts
    from an adapter goes on with that one."""
    critic_lr: Positive = 5e-6
    """Highest learning rate of the critic; its schedule is the policy's."""
    critic_weight_decay: NonNegative = 0.0
    """Weight decay of the critic."""
    critic_max_grad_norm: Positive | None = 1.0
    """Clip the critic's gradient norm to this; null for no clipping."""
    rollout_batches: Count = 1
    """How many batches of batch.size prompts are answered before the weights move."""
    epochs: Count = 1
    """How often the answers of one rollout are learned from."""
    max_new_tokens: Count = 256
    """Longest answer in tokens; a prompt has data.max_length less this."""
    temperature: Positive = 1.0
    """Of the answers' draws."""
    top_p: Annotated[float, Field(gt=0, le=1), Number] = 1.0
    """Draw from the fewest likeliest tokens that add up to this."""
    kl: NonNegative = 0.1
    """Coefficient of the KL penalty in the reward of every token; where kl_target is set, its first value."""
    kl_target: Annotated[Positive | None, Field(examples=[6.0])] = None
    """KL per answer that the coefficient is steered to (Ziegler et al. 2019); null: it stays as it is."""
    kl_horizon: Positive = 10000.0
    """Answers over which the coefficient is steered."""
    kl_bound: Annotated[Positive | None, Field(examples=[50.0])] = 50.0
    """Mean KL per answer beyond which only the KL penalty is learned from, to come back; null: no bound."""
    reward_clip: Positive | None = 5.0
    """Scores are clipped to plus and minus this; null: not at all."""
    ratio_clip: Positive = 0.2
    """How far the probability ratio may move before its gradient stops."""
    value_clip: Positive | None = 0.2
    """How far a value may move from the rollout's; null: as far as it likes."""
    gamma: Annotated[float, Field(gt=0, le=1), Number] = 1.0
    """Discount per token."""
    gae_lambda: Annotated[float, Field(ge=0, le=1), Number] = 0.95
    """Of generalised advantage estimation (Schulman et al. 2016)."""
    whiten: Flag = False
    """Bring the advantages of a rollout to mean 0 and deviation 1."""
    entropy: NonNegative = 0.0
    """Coefficient of the policy's entropy, which is added to what is maximised."""
    ratio_bound: Positive = 10.0
    """Mean probability ratio of a step beyond which it does not count."""
    ema: Annotated[Annotated[float, Field(gt=0, lt=1), Number] | None, Field(examples=[0.992])] = None
    """Keep a moving average of the policy with this decay, and save it beside the model; null: none."""
    unsup_coef: NonNegative = 0.0
    """Weight of the language-modelling loss on unsup_data beside the policy's; DeepSpeed-Chat has 27.8."""
    unsup_data: Literal["none"] | Sources = Field(default="none", examples=["data/texts.jsonl"])
    """Plain texts or answers whose loss is mixed in."""
    patience: Count = 3
    """Rollouts in a row that may be held back before the run ends with exit 5."""
    engine: Literal["embedded", "vllm"] = "embedded"
    """What writes the answers: this process, or a vLLM server."""
    vllm_url: Annotated[Text | None, Field(examples=["http://127.0.0.1:8000"])] = None
    """Address of the vLLM server."""

    @field_serializer("unsup_data", when_used="json")
    def _short(self, value: Any) -> Any:
        return plain_sources(value) if isinstance(value, tuple) else value


class RewardTerm(Section):
    name: Annotated[Text, Field(examples=["numeric"])]
    """exact, numeric, choice, regex, length, json, math or code, which surefoot has (docs/grpo.md); FILE.py:FUNCTION,
    MODULE:FUNCTION or entry_point:NAME; or an http(s) address."""
    weight: Annotated[float, Number] = 1.0
    """What its scores are multiplied by before all are added up; 0: they are logged, and not learned from."""
    field: Annotated[Text | None, Field(examples=["answer"])] = None
    """exact, numeric, choice and math: field of the record with the right answer; null: answer. json: field with a
    schema; null: any JSON will do. code: field with the tests; null: tests."""
    pattern: Annotated[Text | None, Field(examples=["<answer>.*</answer>"])] = None
    """regex: Python's regular expression that an answer has to contain. exact, numeric, choice, math and code: with one
    group, which holds what is compared or run; null: as docs/grpo.md says."""
    longest: Annotated[Count | None, Field(examples=[200])] = None
    """length: tokens of an answer beyond which it scores 0."""
    seconds: Annotated[Positive | None, Field(examples=[10])] = None
    """math: for one comparison. code: CPU time of one program, in whole seconds. null: 5."""


class GrpoConfig(Section):
    rewards: list[Annotated[RewardTerm, ShortForm("name")]] = Field(
        default=[], examples=[["numeric"], [{"name": "numeric"}, {"name": "style.py:short", "weight": 0.1}]]
    )
    """Where scores come from: a list of names, or of {name, weight}. Their weighted sum is what is learned from."""
    run_code: Flag = False
    """Allow the reward code to run programs that the model writes, confined as SECURITY.md says."""
    loss: GroupLoss = "dapo"
    """docs/grpo.md has the formulas. dapo: Yu et al. 2025. grpo: Shao et al. 2024. bnpo: TRL's. dr_grpo: Liu et al.
    2025. cispo: MiniMax 2025. gspo: Zheng et al. 2025. rloo: Ahmadian et al. 2024. reinforce++: Hu 2025."""
    group: Annotated[int, Field(ge=2), Number] = 8
    """Answers to each prompt, which are compared with each other. batch.size counts answers."""
    rollout_batches: Count = 1
    """How many batches of batch.size answers are written before the weights move."""
    epochs: Count = 1
    """How often the answers of one rollout are learned from."""
    ahead: Annotated[int, Field(ge=0), Number] = 0
    """So many rollouts before they are learned from answers are drawn: by a policy that is so many rollouts old, which
    ratios then compare with."""
    max_new_tokens: Count = 256
    """Longest answer in tokens; a prompt has data.max_length less this."""
    temperature: Positive = 1.0
    """Of the answers' draws."""
    top_p: Annotated[float, Field(gt=0, le=1), Number] = 1.0
    """Draw from the fewest likeliest tokens that add up to this. Ratios are then those among these tokens."""
    top_k: Annotated[Count | None, Field(examples=[20])] = None
    """Draw from the likeliest so many tokens alone, of which top_p then takes its part; null: from all."""
    correction: CorrectionKind = "none"
    """What answers are weighed by where the engine that drew them finds their tokens more or less likely than the code
    that learns does: by the ratio of the two, of each token or of the whole answer, cut at correction_low and
    correction_high (truncate), or 0 beyond them (mask)."""
    correction_low: Annotated[Positive | None, Field(examples=[0.5])] = None
    """Lowest such ratio; null: no bound."""
    correction_high: Annotated[Positive | None, Field(examples=[2.0])] = 3.0
    """Highest such ratio; null: no bound."""
    mismatch_bound: Annotated[Literal["auto"] | Positive | None, Field(examples=[0.05])] = "auto"
    """Mean difference of log-probabilities per token, engine to trainer, beyond which `mismatch` acts. auto: what the
    type of the products explains, 1e-3 in fp32, 0.02 in fp16, 0.1 in bf16; null: no bound."""
    mismatch: Literal["stop", "caution"] = "stop"
    """What a rollout beyond mismatch_bound does: exit 5 before anything is learned from it, or a caution."""
    baseline: Literal["auto", "group", "others", "step"] = "auto"
    """What is taken off a score. group: the mean of its group. others: the mean of the group's other answers. step: the
    mean of the rollout. auto: as the loss is defined."""
    scale: Literal["auto", "group", "step", "none"] = "auto"
    """What that difference is divided by: the deviation of the group, of the rollout, or nothing. auto: as the loss is
    defined."""
    clip_low: Annotated[Literal["auto"] | Positive, Field(examples=[0.2])] = "auto"
    """How far below 1 a probability ratio may fall before its gradient stops; auto: as the loss is defined."""
    clip_high: Annotated[Literal["auto"] | Positive, Field(examples=[0.28])] = "auto"
    """The same above 1."""
    kl: NonNegative = 0.0
    """Coefficient of the KL penalty that holds the policy to the base; 0: none, and no reference is loaded."""
    overlong: Literal["learn", "mask", "penalise"] = "learn"
    """What becomes of answers that reach max_new_tokens without an end. learn: their score counts as any other. mask:
    they count in their group's mean, and are not learned from. penalise: the last overlong_buffer tokens before
    max_new_tokens take up to 1 off the score (DAPO's soft penalty, Yu et al. 2025)."""
    overlong_buffer: Annotated[Count | None, Field(examples=[64])] = None
    """Tokens over which the penalty grows from 0 to 1; null: a fifth of max_new_tokens."""
    redraw: Annotated[int, Field(ge=0), Number] = 0
    """How often the groups of a rollout whose answers all have one score are put aside and other prompts answered in
    their place (dynamic sampling, Yu et al. 2025)."""
    control: Literal["none", "random"] = "none"
    """random: learn from random numbers in place of the scores, which are only logged: what a run gains over this one
    is due to its rewards."""
    eval_answers: Annotated[int, Field(ge=0), Number, Field(examples=[8])] = 0
    """Answers that each evaluation draws to every held-out prompt, beside the likeliest one, for pass_at_1, pass_at_2,
    pass_at_4, ... (Chen et al. 2021); 0: none."""
    eval_passes: Annotated[float, Number] = 1.0
    """Score from which on a drawn answer passes."""
    ratio_bound: Positive = 10.0
    """Mean probability ratio of a step beyond which it does not count."""
    patience: Count = 3
    """Rollouts in a row without any spread of scores, or held back, before the run ends with exit 5."""
    engine: Literal["embedded", "vllm"] = "embedded"
    """What writes the answers: this process, or a vLLM server."""
    vllm_url: Annotated[Text | None, Field(examples=["http://127.0.0.1:8000"])] = None
    """Address of the vLLM server."""
