"""Trainings of TRL are taken over as TRL computes them. Skips without TRL; `make takeover` installs it."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM

from helpers.faults import refused_settings
from helpers.tiny_models import tiny_llama
from interop.takeover.test_take_over import Told, context, handed, proven, raises_code, refused, translated  # noqa: F401
from surefoot.commands.run import prove
from surefoot.interop.draft import with_overrides
from surefoot.interop.takeover.in_script.weights import load_trained
from surefoot.interop.takeover.session import Taken

trl = pytest.importorskip("trl")
from datasets import Dataset  # noqa: E402
from trl.experimental.cpo import CPOConfig, CPOTrainer  # noqa: E402
from trl.experimental.orpo import ORPOConfig, ORPOTrainer  # noqa: E402
from trl.rewards import think_format_reward  # noqa: E402

PAIRS = [
    {"prompt": f"What is {number} times 7?", "chosen": f" It is {number * 7}.", "rejected": f" I say {number}, friend."}
    for number in range(12)
]
SENTENCES = [{"text": f"Heron {number} counts {'fish ' * (number % 5)}and sleeps."} for number in range(20)]
KINDS = {
    "sft": (trl.SFTTrainer, trl.SFTConfig, SENTENCES),
    "dpo": (trl.DPOTrainer, trl.DPOConfig, PAIRS),
    "reward": (trl.RewardTrainer, trl.RewardConfig, PAIRS),
    "kto": (
        trl.KTOTrainer,
        trl.KTOConfig,
        [{"prompt": one["prompt"], "completion": one[name], "label": name == "chosen"}
         for one in PAIRS for name in ("chosen", "rejected")],
    ),
    "orpo": (ORPOTrainer, ORPOConfig, PAIRS),
    "cpo": (CPOTrainer, CPOConfig, PAIRS),
}  # fmt: skip
STAGES = {"orpo": "dpo", "cpo": "dpo"}
SHAPE = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.5}


def adapter(kind):
    return LoraConfig(**SHAPE, **({"task_type": "SEQ_CLS"} if kind == "reward" else {}))


def rows_of(taken):
    return [json.loads(line) for line in (taken.folder / "train.jsonl").read_text().splitlines()]


def change_rows(taken, change):
    rows = [change(row) for row in rows_of(taken)]
    (taken.folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


PLAIN = {"per_device_train_batch_size": 4, "report_to": "none", "use_cpu": True, "bf16": False}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("trl") / "base")


@pytest.fixture
def build(base, tmp_path):
    """Build a trainer as a script would."""

    def build(kind, *, model=None, arguments=None, **more):
        trainer, config, rows = KINDS[kind]
        tokenizer = AutoTokenizer.from_pretrained(base)
        tokenizer.pad_token = tokenizer.eos_token
        return trainer(
            model=model or str(base),
            args=config(str(tmp_path / "out"), **PLAIN, **(arguments or {})),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            **more,
        )

    return build


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_are_the_trainers(build, tmp_path, kind, adapted):
    trainer = build(kind, peft_config=adapter(kind) if adapted else None)
    taken, over = handed(trainer, tmp_path / "taken")
    proven(taken, over)
    assert translated(taken).config["stage"] == STAGES.get(kind, kind)
    logged = vars(trainer).get("_metrics") or trainer._stored_metrics
    assert not any(one for side in logged.values() for one in side.values())  # the script's own log is as before


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize(("kind", "how"), [("sft", {}), ("dpo", {}), ("dpo", {"router_aux_loss_coef": 0.25})])
def test_the_routers_loss_is_the_trainers(build, base, tmp_path, kind, how):
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "routed")
    shape = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "num_local_experts": 4, "router_aux_loss_coef": 0.5}
    experts = MixtralConfig(vocab_size=329, **shape)
    MixtralForCausalLM(experts).save_pretrained(tmp_path / "routed")
    taken, over = handed(build(kind, model=str(tmp_path / "routed"), arguments=how), tmp_path / "taken")
    proven(taken, over)
    without = with_overrides(translated(taken), ["model.router_aux_loss_coef=0"])
    with raises_code("SF-TAKE-OVER"):  # twin
        prove(taken, without, over.loss_of)


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_twin_a_label_mask_shifted_by_one_is_found(build, tmp_path, side):
    taken, over = handed(build("dpo"), tmp_path / "taken")

    def shifted(row):
        labels = [*row["labels"][1:], row["input_ids"][-1]]  # the answer begins one token early
        return {**row, "labels": [row["input_ids"][place] if one != -100 else one for place, one in enumerate(labels)]}

    change_rows(taken, lambda row: {**row, side: shifted(row[side])})
    with raises_code("SF-TAKE-OVER"):
        proven(taken, over)


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize("kind", ["dpo", "reward"])
def test_twin_a_prompt_added_twice_is_found(build, tmp_path, kind):
    taken, over = handed(build(kind), tmp_path / "taken")

    def doubled(row):
        return {"input_ids": row["input_ids"][:4] + row["input_ids"], "labels": [-100] * 4 + row["labels"]}

    change_rows(taken, lambda row: {name: doubled(one) for name, one in row.items()})
    with raises_code("SF-TAKE-OVER"):
        proven(Taken(taken.folder, {**taken.record, "longest": taken.record["longest"] + 4}), over)


@pytest.mark.usefixtures("context")
def test_twin_a_judgement_turned_round_is_found(build, tmp_path):
    """Of all rows: with the weights the same at first, the loss is too, but not the gradient."""
    taken, over = handed(build("kto", arguments={"desirable_weight": 2.0}), tmp_path / "taken")
    proven(taken, over)
    change_rows(taken, lambda row: {**row, "label": not row["label"]})
    with raises_code("SF-TAKE-OVER"):
        proven(taken, over)


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize(
    "arguments",
    [
        {"loss_type": "ipo", "beta": 0.3},
        {"loss_type": ["hinge", "sft"], "loss_weights": [1.0, 0.5]},
        {"label_smoothing": 0.2},
        {"loss_type": "apo_zero"},
        {"loss_type": "exo_pair", "label_smoothing": 0.1},
        {"precompute_ref_log_probs": True},
        {"max_length": 24, "truncation_mode": "keep_end"},
    ],
)
def test_losses_and_their_parameters_are_taken(build, tmp_path, arguments):
    proven(*handed(build("dpo", arguments=arguments), tmp_path / "taken"))


@pytest.mark.usefixtures("context")
def test_weights_of_tokens_are_taken(build, tmp_path):
    taken, over = handed(build("sft", arguments={"loss_type": "dft"}), tmp_path / "taken")
    assert translated(taken).config["sft"] == {"loss": "dft"}
    proven(taken, over)
    del taken.record["arguments"]["loss_type"]  # twin
    with raises_code("SF-TAKE-OVER"):
        proven(taken, over)


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize(
    "arguments",
    [
        {"loss_type": "simpo", "simpo_gamma": 0.7, "cpo_alpha": 0.0},
        {"label_smoothing": 0.1, "cpo_alpha": 1.5, "beta": 0.3},
        {"max_length": 14},
    ],
)
def test_reference_free_losses_are_taken(build, tmp_path, arguments):
    proven(*handed(build("cpo", arguments=arguments), tmp_path / "taken"))


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("dpo", {"alignment.beta": 0.11}),
        ("dpo", {"alignment.loss": "hinge"}),
        ("orpo", {"alignment.sft_prompt": "false"}),
        ("orpo", {"alignment.beta": 0.2}),
        ("cpo", {"alignment.sft": 0.5}),
        ("cpo", {"alignment.loss": "simpo"}),
    ],
)
def test_twin_a_default_of_another_version_is_found(build, tmp_path, kind, changed):
    taken, over = handed(build(kind), tmp_path / "taken")
    found = with_overrides(translated(taken), [f"{key}={value}" for key, value in changed.items()])
    with raises_code("SF-TAKE-OVER"):
        prove(taken, found, lambda places: over.loss_of(places, ()))


@pytest.mark.parametrize(
    ("kind", "arguments", "name"),
    [
        ("dpo", {"f_divergence_type": "js_divergence"}, "f_divergence_type"),
        ("dpo", {"loss_type": "aot"}, "loss_type"),
        ("dpo", {"use_weighting": True}, "use_weighting"),
        ("kto", {"loss_type": "apo_zero_unpaired"}, "loss_type"),
    ],
)
def test_another_loss_is_refused_by_name(build, tmp_path, kind, arguments, name):
    taken, _ = handed(build(kind, arguments=arguments), tmp_path / "taken")
    assert refused_settings(lambda: translated(taken)) == [name]


def test_what_a_reward_model_has_besides_is_refused(build, tmp_path):
    centred, _ = handed(build("reward", arguments={"center_rewards_coefficient": 0.1}), tmp_path / "centred")
    assert refused(centred) == {"center_rewards_coefficient": False}
    frozen, _ = handed(build("reward", peft_config=LoraConfig(**SHAPE)), tmp_path / "frozen")
    assert refused(frozen) == {"requires_grad": False}


def test_a_callback_and_a_loss_of_the_scripts_own_are_named(build, tmp_path):
    trainer = build("dpo", callbacks=[Told()])
    trainer.compute_loss_func = print
    taken, _ = handed(trainer, tmp_path / "taken")
    assert refused(taken) == {"Told": True, "compute_loss_func": True}


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize("moved", [False, True])
def test_the_reference_is_the_adapter_that_the_script_began_with(build, base, tmp_path, moved):
    """TRL copies the adapter of a PeftModel. One that adds nothing is the base."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter("dpo"))
    if moved:
        for name, one in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(one, std=0.3, generator=torch.Generator().manual_seed(0))
    folder = tmp_path / "taken.partial"
    taken, over = handed(build("dpo", model=model), folder)
    taken = Taken(folder.rename(tmp_path / "taken"), taken.record)
    assert taken.record["reference"] == ("ref" if moved else "")
    proven(taken, over)


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize("adapted", [False, True])
def test_another_reference_model_is_taken(build, base, tmp_path, adapted):
    other = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    trainer = build("dpo", ref_model=other, peft_config=adapter("dpo") if adapted else None)
    taken, over = handed(trainer, tmp_path / "taken")
    assert taken.record["reference"] == "reference"
    proven(taken, over)
    own = Taken(taken.folder, {**taken.record, "reference": ""})  # twin: the base is the reference
    with raises_code("SF-TAKE-OVER"):
        proven(own, over)


def test_for_kto_another_reference_model_is_refused(build, base, tmp_path):
    """Its KL term pairs prompts with other answers than surefoot's, and is not 0 at first."""
    other = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    taken, _ = handed(build("kto", ref_model=other), tmp_path / "taken")
    assert refused(taken) == {"ref_model": False}


def test_a_second_copy_of_the_base_is_not_another_reference(build, base, tmp_path):
    same = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    taken, _ = handed(build("dpo", ref_model=same), tmp_path / "taken")
    assert taken.record["reference"] == ""


@pytest.mark.usefixtures("context")
def test_a_score_is_read_before_an_end_that_is_pad(build, tmp_path):
    """As transformers' classifiers do: PAD is EOS here, with which every answer ends."""
    trainer = build("reward")
    ends = {one["chosen_ids"][-1] for one in trainer.train_dataset}
    assert ends == {trainer.processing_class.pad_token_id}
    taken, _ = handed(trainer, tmp_path / "taken")
    assert not ends & {row["chosen"]["input_ids"][-1] for row in rows_of(taken)}


def test_weights_of_a_reward_model_come_back(build, tmp_path):
    trainer = build("reward", peft_config=adapter("reward"))
    handed(trainer, tmp_path / "taken")
    trained = {name: torch.full_like(one, 0.5) for name, one in get_peft_model_state_dict(trainer.model).items()}
    head = trained.pop("base_model.model.score.weight")
    run = tmp_path / "run"
    run.mkdir()
    save_file(trained, run / "adapter_model.safetensors")
    save_file({"v_head.summary.weight": head, "v_head.summary.bias": torch.zeros(1)}, run / "value_head.safetensors")
    load_trained(trainer.model, run)
    assert all((one == 0.5).all() for one in get_peft_model_state_dict(trainer.model).values())


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize(
    ("packed", "room"),
    [
        ({"packing": True}, 32),
        ({"packing": True, "packing_strategy": "bfd_split"}, 32),
        ({"packing": True, "packing_strategy": "wrapped"}, None),
        ({"padding_free": True, "max_length": None}, None),
    ],
)
def test_packed_rows_are_taken_as_their_texts(build, tmp_path, packed, room):
    """Those of TRL's wrapped strategy are one text each, as there; its rows have EOS within, which is PAD here."""
    taken, over = handed(build("sft", arguments={"max_length": 32, **packed}), tmp_path / "taken")
    proven(taken, over)
    assert translated(taken).config["batch"].get("row_tokens") == room


@pytest.mark.usefixtures("context")
def test_the_texts_of_packed_rows_are_those_of_unpacked_ones(build, tmp_path):
    packed, _ = handed(build("sft", arguments={"max_length": 100, "packing": True}), tmp_path / "packed")
    plain, _ = handed(build("sft"), tmp_path / "plain")
    assert len(rows_of(packed)) == len(SENTENCES)
    assert {tuple(one["input_ids"]) for one in rows_of(packed)} == {tuple(one["input_ids"]) for one in rows_of(plain)}
    assert packed.record["steps"] < plain.record["steps"]  # of fewer rows


def by_length(completions, **fields):
    return [float(len(one)) for one in completions]


def nested():
    def inside(completions, **fields):
        return [0.0] * len(completions)

    return inside


QUESTIONS = [{"prompt": f"What is {number} times 7?", "solution": str(number * 7)} for number in range(12)]
TURNS = [{**one, "prompt": [{"role": "user", "content": one["prompt"]}]} for one in QUESTIONS]
ANSWERS = {"num_generations": 4, "max_completion_length": 16}


@pytest.fixture
def answering(base, tmp_path):
    def build(kind="GRPO", rewards=(by_length,), rows=QUESTIONS, adapted=None, arguments=None):
        tokenizer = AutoTokenizer.from_pretrained(base)
        tokenizer.pad_token = tokenizer.eos_token
        config = getattr(trl, f"{kind}Config")(str(tmp_path / "out"), **PLAIN, **ANSWERS, **(arguments or {}))
        return getattr(trl, f"{kind}Trainer")(
            model=str(base), reward_funcs=list(rewards), args=config, train_dataset=Dataset.from_list(list(rows)),
            processing_class=tokenizer, peft_config=adapted,
        )  # fmt: skip

    return build


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
@pytest.mark.parametrize("rows", [QUESTIONS, TURNS])
def test_prompts_rewards_and_settings_of_answers_are_taken(answering, tmp_path, monkeypatch, kind, rows):
    arguments = {"beta": 0.04, "gradient_accumulation_steps": 2, "num_train_epochs": 2, "reward_weights": [0.5, 2.0]}
    trainer = answering(kind, (by_length, think_format_reward), rows, arguments=arguments)
    taken, over = handed(trainer, tmp_path / "taken")
    proven(taken, over)
    config = translated(taken).config
    assert (config["stage"], config["grpo"]["kl"], config["grpo"]["group"]) == ("grpo", 0.04, 4)
    assert config["grpo"].get("loss") == ("rloo" if kind == "RLOO" else None)
    own, format_reward = config["grpo"]["rewards"]
    assert own == {"name": f"{__file__}:by_length", "convention": "trl", "weight": 0.5}
    assert (format_reward["name"], format_reward["weight"]) == ("regex", 2.0)
    assert [row["solution"] for row in rows_of(taken)] == [row["solution"] for row in rows]
    steps = []
    monkeypatch.setattr(type(trainer), "training_step", lambda self, *rest: torch.zeros((), requires_grad=False))
    trainer.train()
    steps.append(trainer.state.global_step)
    assert config["duration"] == f"{steps[0]} steps"
    assert config["batch"]["size"] == 8  # answers of a step


@pytest.mark.usefixtures("context")
def test_twin_other_prompts_are_found(answering, tmp_path):
    taken, over = handed(answering(rows=TURNS), tmp_path / "taken")
    change_rows(taken, lambda row: {**row, "prompt": row["prompt"][0]["content"]})  # without the template
    with raises_code("SF-TAKE-OVER"):
        proven(taken, over)


def test_what_cannot_answer_here_is_refused_by_name(answering, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("def own(completions, **fields):\n    return [0.0] * len(completions)\n\ntrainer.train()\n")
    scope = {"__name__": "__main__"}
    exec(compile(script.read_text().replace("trainer.train()", ""), str(script), "exec"), scope)
    rewards = (scope["own"], nested(), by_length)
    taken, _ = handed(answering(rewards=rewards), tmp_path / "taken")
    assert refused(taken) == {"own": False, nested().__qualname__: False}
    script.write_text(script.read_text().replace("trainer", 'if __name__ == "__main__":\n    trainer'))
    taken, _ = handed(answering(rewards=rewards[:1]), tmp_path / "again")
    assert refused(taken) == {}
    trainer = answering()
    trainer.rollout_func = print
    assert refused(handed(trainer, tmp_path / "drawn")[0]) == {"rollout_func": False}


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize(
    ("arguments", "name"), [({"loss_type": "sapo"}, "loss_type"), ({"repetition_penalty": 1.1}, "repetition_penalty")]
)
def test_a_setting_of_answers_that_surefoot_lacks_is_refused(answering, tmp_path, arguments, name):
    taken, _ = handed(answering(arguments=arguments), tmp_path / "taken")
    assert refused_settings(lambda: translated(taken)) == [name]
