"""Config keys of single methods: sft and pretrain, reward, dpo and kto, ppo, grpo, distill.

Those of every run are in `surefoot.config.schema`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_serializer

from surefoot.config.sections import AdapterShape, Sources, plain_sources
from surefoot.config.types import Count, Flag, NonNegative, Number, OwnFunction, Positive, Section, ShortForm, Text
from surefoot.method_facts.losses import GROUP_LOSSES, PAIR_LOSSES, REWARD_LOSSES, TOKEN_LOSSES, CorrectionKind
from surefoot.system.locations import is_address, is_function

if TYPE_CHECKING:
    TokenLoss = str
    PairLoss = str
    RewardLoss = str
    GroupLoss = str
else:  # the rows are the only list of names, but a type checker needs constants
    TokenLoss = Literal[tuple(TOKEN_LOSSES)]
    PairLoss = Literal[tuple(PAIR_LOSSES)]
    RewardLoss = Literal[tuple(REWARD_LOSSES)]
    GroupLoss = Literal[tuple(GROUP_LOSSES)]


class SftConfig(Section):
    loss: TokenLoss = "cross_entropy"
    """Weight of each learned token, a constant in the gradient. cross_entropy: 1. dft: its own probability (Wu et al.
    2025), so that tokens far from what the model would say count little. eaft: by the entropy of the model's
    prediction, so that tokens of which it is sure count little. asft: as dft, plus a penalty for leaving the model as
    it was before training (Zhu et al. 2025). Evaluations report the cross entropy."""
    alpha: NonNegative = 1.0
    """eaft only: exponent of the weight."""
    top: Annotated[int, Field(ge=2), Number] = 20
    """eaft only: likeliest tokens among which the entropy is taken."""
    entropy: Positive = 3.0
    """eaft only: entropy, in nats, at which a token has weight 1."""
    kl: Positive = 0.1
    """asft only: weight of the KL divergence from the model before training to the trained one."""


class RewardConfig(Section):
    loss: RewardLoss | OwnFunction = "last"
    """Which scores of a pair are compared. last: at the last token of each answer. divergence: the mean over all
    positions from the first token at which the answers differ, as in DeepSpeed-Chat. FILE.py:FUNCTION, MODULE:FUNCTION
    or entry_point:NAME: a custom loss, pairs -> loss per pair."""
    num_padding_at_beginning: Annotated[Literal["auto"] | Annotated[int, Field(ge=0), Number], Field(examples=[1])] = (
        "auto"
    )
    """divergence only: number of PAD tokens at the start of every sequence. auto: 1 if the tokenizer starts texts with
    its PAD, as OPT's does, else 0."""
    center: NonNegative = 0.0
    """Coefficient of the squared sum of both scores, which centers scores at 0 (Eisenstein et al. 2023); 0: off."""
    init: Annotated[Text | None, Field(examples=["runs/reward"])] = None
    """Reward model whose value head initializes this run's; null: zeros."""


class AlignmentConfig(Section):
    loss: PairLoss | OwnFunction = "sigmoid"
    """dpo only. sigmoid: DPO (Rafailov et al. 2023). ipo: Azar et al. 2023. hinge: Zhao et al. 2023 (SLiC). orpo: Hong
    et al. 2024. simpo: Meng et al. 2024. cpo: Xu et al. 2024. sigmoid_norm: DPO per token. robust: Chowdhury et al.
    2024. exo_pair: Ji et al. 2024. nca_pair: Chen et al. 2024. bco_pair: Jung et al. 2024. sppo_hard: Wu et al. 2024.
    apo_zero: D'Oosterlinck et al. 2024. apo_down: the same. discopop: Lu et al. 2024. FILE.py:FUNCTION, MODULE:FUNCTION
    or entry_point:NAME: a custom loss, (pairs, constants) -> loss per pair. Without a reference: orpo, simpo and
    cpo."""
    beta: Positive = 0.1
    """Strength of the penalty for leaving the reference; orpo: weight of the odds ratio; simpo, cpo: scale of the
    reward."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), Number] = 0.0
    """sigmoid, cpo, robust and exo_pair only: assumed fraction of pairs with swapped labels (conservative DPO)."""
    margin: NonNegative = 0.5
    """simpo only: target margin between the rewards of the two answers, gamma in the paper."""
    sft: NonNegative = 0.0
    """dpo only: weight of the cross entropy on the better answers, added to the loss. At 1 by definition: orpo and
    cpo."""
    sft_prompt: Flag = False
    """dpo only: the cross entropy also counts the tokens of the prompt, as in TRL's ORPO; not beside a reference."""
    good: NonNegative = 1.0
    """kto only: weight of good answers."""
    bad: NonNegative = 1.0
    """kto only: weight of bad answers."""
    reference: Annotated[Text, Field(examples=["cached"])] = "auto"
    """Reference policy. auto: adapter-off with an adapter, else model. adapter-off: the base with the adapter disabled.
    model: a second copy of the base. cached: log-probabilities of the base, computed once before step 1. none: for a
    custom loss without a reference. Anything else: folder or hub id of another model with the same tokenizer."""


class PpoConfig(Section):
    reward: Annotated[Text | None, Field(examples=["runs/reward"])] = None
    """Source of scores: a reward model's folder or hub id; FILE.py:FUNCTION, which takes prompts and responses (lists
    of texts) and returns a number for each; or an http(s) address, which receives the same as JSON. A Python caller may
    pass a function instead."""
    critic: Annotated[Text | None, Field(examples=["runs/reward"])] = None
    """Model that initializes the critic; null: the reward model if there is one, else the policy."""
    critic_adapter: Annotated[
        Literal["as_policy", "none"] | AdapterShape, Field(examples=[{"kind": "lora", "rank": 8}])
    ] = "as_policy"
    """What trains in the critic besides its value head. as_policy: an adapter like the policy's, or all weights if the
    policy has none. none: all weights. Or a separate adapter, with keys as in `adapter`. A critic that is initialized
    from an adapter continues to train that one."""
    critic_lr: Positive = 5e-6
    """Peak learning rate of the critic; it follows the policy's schedule."""
    critic_weight_decay: NonNegative = 0.0
    """Weight decay of the critic."""
    critic_max_grad_norm: Positive | None = 1.0
    """Clip the critic's gradient norm to this; null for no clipping."""
    rollout_batches: Count = 1
    """Batches of batch.size prompts that are answered before the weights change."""
    epochs: Count = 1
    """Passes over the answers of one rollout."""
    max_new_tokens: Count = 256
    """Maximum tokens per answer; a prompt has at most data.max_length minus this."""
    temperature: Positive = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0, le=1), Number] = 1.0
    """Nucleus sampling: sample from the smallest set of most likely tokens with this total probability."""
    kl: NonNegative = 0.1
    """Coefficient of the KL penalty in the reward of every token; its initial value if kl_target is set."""
    kl_target: Annotated[Positive | None, Field(examples=[6.0])] = None
    """Target KL per answer for an adaptive coefficient (Ziegler et al. 2019); null: the coefficient is constant."""
    kl_horizon: Positive = 10000.0
    """Horizon of the adaptive coefficient, in answers."""
    kl_bound: Annotated[Positive | None, Field(examples=[50.0])] = 50.0
    """Mean KL per answer above which only the KL penalty trains, to bring the policy back; null: no bound."""
    reward_clip: Positive | None = 5.0
    """Clip scores to plus and minus this; null: no clipping."""
    ratio_clip: Positive = 0.2
    """Clipping range of the probability ratio around 1."""
    value_clip: Positive | None = 0.2
    """Clipping range of values around the rollout's; null: no clipping."""
    gamma: Annotated[float, Field(gt=0, le=1), Number] = 1.0
    """Discount per token."""
    gae_lambda: Annotated[float, Field(ge=0, le=1), Number] = 0.95
    """Lambda of generalized advantage estimation (Schulman et al. 2016)."""
    whiten: Flag = False
    """Normalize the advantages of a rollout to mean 0 and standard deviation 1."""
    entropy: NonNegative = 0.0
    """Coefficient of the entropy bonus."""
    ratio_bound: Positive = 10.0
    """Mean probability ratio of a step above which the step is skipped."""
    ema: Annotated[Annotated[float, Field(gt=0, lt=1), Number] | None, Field(examples=[0.992])] = None
    """Decay of a moving average of the policy, which is saved next to the model; null: none."""
    unsup_coef: NonNegative = 0.0
    """Weight of the language-modeling loss on unsup_data, added to the policy's loss; DeepSpeed-Chat uses 27.8."""
    unsup_data: Literal["none"] | Sources = Field(default="none", examples=["data/texts.jsonl"])
    """Plain texts or answers for that loss."""
    patience: Count = 3
    """Consecutive rollouts that may be held back before the run ends with exit 5."""
    engine: Literal["embedded", "vllm"] = "embedded"
    """What generates answers: this process or a vLLM server."""
    vllm_url: Annotated[Text | None, Field(examples=["http://127.0.0.1:8000"])] = None
    """Address of the vLLM server."""

    @field_serializer("unsup_data", when_used="json")
    def _short(self, value: Any) -> Any:
        return plain_sources(value) if isinstance(value, tuple) else value


class DistillConfig(Section):
    teacher: Annotated[Text | None, Field(examples=["meta-llama/Llama-3.1-70B-Instruct"])] = None
    """Model whose next-token distributions are learned: a folder or hub id of a model, or of an adapter, with the
    student's tokenizer; a folder written by `surefoot teach`; or the http(s) address of a vLLM server."""
    teacher_name: Annotated[Text | None, Field(examples=["large"])] = None
    """Name of the teacher on its server; null: its only model, or its only adapter."""
    top: Annotated[int, Field(ge=1), Number] = 20
    """Teacher on a server: likeliest tokens that it returns at each position; at most its --max-logprobs."""
    beta: Annotated[float, Field(ge=0, le=1), Number] = 0.0
    """Divergence from the teacher (Agarwal et al. 2024). 0: forward KL, the teacher's mean of log q - log p. 1: reverse
    KL, the student's mean of log p - log q. Between: generalized Jensen-Shannon divergence; 0.5 is the usual one."""
    temperature: Positive = 1.0
    """Temperature of both distributions in the divergence."""
    sft: NonNegative = 0.0
    """Weight of the cross entropy of the data's answers, added to the divergence."""
    on_policy: Annotated[float, Field(ge=0, le=1), Number] = 0.0
    """Share of examples whose answer the student draws anew in each step, lambda of GKD; the others have the data's."""
    max_new_tokens: Count = 256
    """on_policy: maximum tokens of a drawn answer, within data.max_length."""
    sampling_temperature: Positive = 1.0
    """on_policy: temperature at which answers are drawn."""
    engine: Literal["embedded", "vllm"] = "embedded"
    """on_policy: what draws answers: this process or a vLLM server."""
    vllm_url: Annotated[Text | None, Field(examples=["http://127.0.0.1:8000"])] = None
    """on_policy: address of the vLLM server."""


class RewardTerm(Section):
    name: Annotated[Text, Field(examples=["numeric"])]
    """A built-in reward (exact, numeric, choice, regex, length, json, math or code, see docs/grpo.md);
    FILE.py:FUNCTION, MODULE:FUNCTION or entry_point:NAME; an http(s) address; or a reward model: a hub id, or a folder
    written with a slash (./reward), of a run of stage reward or of a merged model."""
    weight: Annotated[float, Number] = 1.0
    """Weight of its scores in the sum; 0: they are only logged."""
    field: Annotated[Text | None, Field(examples=["answer"])] = None
    """exact, numeric, choice and math: field of the record with the correct answer; null: answer. json: field with a
    schema; null: any valid JSON passes. code: field with the tests; null: tests."""
    pattern: Annotated[Text | None, Field(examples=["<answer>.*</answer>"])] = None
    """regex: Python regular expression that must match somewhere in the answer. exact, numeric, choice, math and code:
    expression with one group, which captures what is compared or run; null: see docs/grpo.md."""
    longest: Annotated[Count | None, Field(examples=[200])] = None
    """length: answers with more tokens than this score 0."""
    seconds: Annotated[Positive | None, Field(examples=[10])] = None
    """Time limit. math: of one comparison. code: CPU time of one program, in whole seconds. null: 5."""
    convention: Literal["trl"] | None = None
    """trl: the function is called as TRL calls reward functions, by keyword, see docs/grpo.md; null: as surefoot's
    own."""

    @property
    def is_model(self) -> bool:
        """Whether it names a reward model."""
        name = self.name
        return "/" in name and not (is_address(name) or is_function(name) or name.startswith("entry_point:"))


class EnvironmentTerm(Section):
    name: Annotated[Text, Field(examples=["tools.py:Calculator"])]
    """FILE.py:CLASS, MODULE:CLASS or entry_point:NAME: a class with reset and step, see docs/grpo.md; or the http(s)
    address of an OpenEnv server."""
    weight: Annotated[float, Number] = 1.0
    """Weight of its rewards, summed over an answer's turns, among grpo.rewards; 0: they are only logged."""
    turns: Count = 4
    """Maximum turns of the policy in an answer."""
    seconds: Positive = 60.0
    """Time limit of one reply of the environment."""
    action: Annotated[Text | None, Field(examples=["message"])] = None
    """OpenEnv: field of an action that gets the text of a turn; null: its only required field."""
    observation: Annotated[Text | None, Field(examples=["prompt"])] = None
    """OpenEnv: field of an observation that is the reply; null: its only field if that is a text, else all as JSON."""


class GrpoConfig(Section):
    rewards: list[Annotated[RewardTerm, ShortForm("name")]] = Field(
        default=[], examples=[["numeric"], [{"name": "numeric"}, {"name": "style.py:short", "weight": 0.1}]]
    )
    """Rewards: a list of names or of {name, weight}. The score is their weighted sum."""
    environment: Annotated[
        Annotated[EnvironmentTerm, ShortForm("name")] | None, Field(examples=["tools.py:Calculator"])
    ] = None
    """Environment that answers the policy between its turns, such as a tool; a name or {name, turns, ...}. Its rewards
    are added to those of grpo.rewards. null: answers have one turn."""
    run_code: Flag = False
    """Allow the reward code to run programs that the model writes, sandboxed as described in SECURITY.md."""
    loss: GroupLoss = "dapo"
    """docs/grpo.md has the formulas. dapo: Yu et al. 2025. grpo: Shao et al. 2024. bnpo: TRL's. dr_grpo: Liu et al.
    2025. cispo: MiniMax 2025. gspo: Zheng et al. 2025. rloo: Ahmadian et al. 2024. reinforce++: Hu 2025."""
    group: Annotated[int, Field(ge=2), Number] = 8
    """Answers per prompt, which are compared with each other. batch.size counts answers."""
    rollout_batches: Count = 1
    """Batches of batch.size answers that are generated before the weights change."""
    epochs: Count = 1
    """Passes over the answers of one rollout."""
    ahead: Annotated[int, Field(ge=0), Number] = 0
    """Generate answers this many rollouts before they are trained on, with a policy that is this many rollouts old;
    probability ratios are relative to that policy."""
    max_new_tokens: Count = 256
    """Maximum tokens per answer, all its turns and what an environment says included; a prompt has at most
    data.max_length minus this."""
    temperature: Positive = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0, le=1), Number] = 1.0
    """Nucleus sampling: sample from the smallest set of most likely tokens with this total probability. Ratios are then
    computed within this set."""
    top_k: Annotated[Count | None, Field(examples=[20])] = None
    """Sample only from this many most likely tokens, before top_p is applied; null: from all."""
    correction: CorrectionKind = "none"
    """Importance weights for differences between the engine's token probabilities and the trainer's: their ratio per
    token or per answer, clipped to correction_low and correction_high (truncate), or 0 outside them (mask)."""
    correction_low: Annotated[Positive | None, Field(examples=[0.5])] = None
    """Lower bound of this ratio; null: no bound."""
    correction_high: Annotated[Positive | None, Field(examples=[2.0])] = 3.0
    """Upper bound of this ratio; null: no bound."""
    mismatch_bound: Annotated[Literal["auto"] | Positive | None, Field(examples=[0.05])] = "auto"
    """Mean difference of log-probabilities per token between engine and trainer above which `mismatch` acts. auto: what
    the compute dtype explains: 1e-3 in fp32, 0.02 in fp16, 0.1 in bf16; null: no bound."""
    mismatch: Literal["stop", "caution"] = "stop"
    """Effect of a rollout above mismatch_bound: exit 5 before training on it, or a warning (caution)."""
    baseline: Literal["auto", "group", "others", "step"] = "auto"
    """Baseline subtracted from a score. group: mean of its group. others: mean of the group's other answers. step: mean
    of the rollout. auto: as the loss defines it."""
    scale: Literal["auto", "group", "step", "none"] = "auto"
    """Divisor of that difference: standard deviation of the group, of the rollout (step), or none. auto: as the loss
    defines it."""
    clip_low: Annotated[Literal["auto"] | Positive, Field(examples=[0.2])] = "auto"
    """Clipping range of the probability ratio below 1; auto: as the loss defines it."""
    clip_high: Annotated[Literal["auto"] | Positive, Field(examples=[0.28])] = "auto"
    """Clipping range of the probability ratio above 1; auto: as the loss defines it."""
    kl: NonNegative = 0.0
    """Coefficient of the KL penalty towards the base model; 0: none, and no reference is loaded."""
    kl_by_ratio: Flag = False
    """Multiply the KL penalty of each token by its unclipped probability ratio, so that its gradient is that of the KL
    of the current policy where an older one drew the answers (DeepSeek-V3.2, arXiv 2512.02556)."""
    overlong: Literal["learn", "mask", "penalise"] = "learn"
    """Treatment of answers that reach max_new_tokens without an end. learn: as any other. mask: they count in the mean
    of their group but carry no loss. penalise: within the last overlong_buffer tokens before max_new_tokens, up to 1
    is subtracted from the score (DAPO's soft penalty, Yu et al. 2025)."""
    overlong_buffer: Annotated[Count | None, Field(examples=[64])] = None
    """Number of tokens over which the penalty grows from 0 to 1; null: a fifth of max_new_tokens."""
    redraw: Annotated[int, Field(ge=0), Number] = 0
    """How often groups whose answers all have the same score are replaced by groups for other prompts (dynamic
    sampling, Yu et al. 2025)."""
    control: Literal["none", "random"] = "none"
    """random: train on random numbers instead of the scores, which are only logged. The gain of another run over this
    one is due to its rewards."""
    eval_answers: Annotated[int, Field(ge=0), Number, Field(examples=[8])] = 0
    """Answers sampled per held-out prompt at each evaluation, in addition to the greedy one, for pass_at_1, pass_at_2,
    pass_at_4, ... (Chen et al. 2021); 0: none."""
    eval_passes: Annotated[float, Number] = 1.0
    """Minimum score at which a sampled answer passes."""
    ratio_bound: Positive = 10.0
    """Mean probability ratio of a step above which the step is skipped."""
    patience: Count = 3
    """Consecutive rollouts without any difference in scores, or held back, before the run ends with exit 5."""
    engine: Literal["embedded", "vllm"] = "embedded"
    """What generates answers: this process or a vLLM server."""
    vllm_url: Annotated[Text | None, Field(examples=["http://127.0.0.1:8000"])] = None
    """Address of the vLLM server."""

    @property
    def reward_models(self) -> dict[str, str]:
        """Reward models among the rewards, each once, and the key that names it first."""
        found: dict[str, str] = {}
        for place, term in enumerate(self.rewards):
            if term.is_model:
                found.setdefault(term.name, f"grpo.rewards[{place}].name")
        return found
