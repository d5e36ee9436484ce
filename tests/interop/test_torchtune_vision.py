"""torchtune's recipes of Llama 3.2 Vision: parts that train, ids and learned tokens, beside what its source says."""

import re

import pytest
from transformers import CONFIG_MAPPING, AutoTokenizer

from data.test_picture_families import SIZES, prepared
from helpers.model_layouts import run_config
from helpers.seeing import picture
from helpers.seeing_families import seeing_family
from helpers.wrappers import WRAPPERS
from interop.test_torchtune import refused, tune
from surefoot.models.facts import facts_of
from surefoot.planning.adapter import plan_adapter
from surefoot.planning.notes import Notes
from surefoot.planning.trained import only_trained
from surefoot.planning.vision import adaptable, plan_vision

MODEL = {"_component_": "torchtune.models.llama3_2_vision.lora_llama3_2_vision_11b", "lora_rank": 8,
         "lora_attn_modules": ["q_proj", "v_proj", "output_proj"], "apply_lora_to_mlp": True}  # fmt: skip
SEEING = {"model": MODEL, "tokenizer": {"_component_": "torchtune.models.llama3_2_vision.llama3_2_vision_transform"},
          "dataset": {"_component_": "torchtune.datasets.the_cauldron_dataset", "subset": "ocrvqa"}}  # fmt: skip
FULL = SEEING | {"model": {"_component_": "torchtune.models.llama3_2_vision.llama3_2_vision_11b"}}


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """Ten layers, of which number 3 and 8 read pictures, as in every ten of the published models."""
    text, eye, others = WRAPPERS["mllama"]
    text = text | {"num_hidden_layers": 10, "cross_attention_layers": [3, 8], "vocab_size": 64, "pad_token_id": 0}
    folder = tmp_path_factory.mktemp("ten")
    CONFIG_MAPPING["mllama"](text_config=text, vision_config=eye, **others).save_pretrained(folder)
    return facts_of(folder)


OURS = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}


def with_lora(decoder, encoder, fusion, attention, *, mlp, output):
    """The linear layers that lora_llama3_2_vision_encoder and _decoder of torchtune (bd2a0fc) give LoRA, by the names
    of transformers: torchtune's projection head is the global transformer and the projector."""
    found = set()
    for number in range(10):
        crosses = number in (3, 8)
        if fusion if crosses else decoder:
            layer = f"model.language_model.layers.{number}"
            kind = "cross_attn" if crosses else "self_attn"
            found |= {f"{layer}.{kind}.{OURS[name]}" for name in attention}
            found |= {f"{layer}.mlp.{name}_proj" for name in ("gate", "up", "down")} if mlp else set()
    for lora, part, count in ((encoder, "transformer", 2), (fusion, "global_transformer", 1)):
        for number in range(count if lora else 0):
            layer = f"model.vision_model.{part}.layers.{number}"
            found |= {f"{layer}.self_attn.{OURS[name]}" for name in attention}
            found |= {f"{layer}.mlp.fc1", f"{layer}.mlp.fc2"} if mlp else set()
    found |= {"lm_head"} if output and decoder else set()
    return found | ({"model.multi_modal_projector"} if output and fusion else set())


@pytest.mark.parametrize("parts", ["fll", "lll", "lff", "flf", "ffl"])
@pytest.mark.parametrize(("mlp", "output"), [(True, False), (False, True)])
def test_adapters_are_where_torchtune_has_them(facts, parts, mlp, output):
    """parts: of decoder, encoder and fusion, (l)ora or (f)rozen. "fll" is that of torchtune's recipes."""
    decoder, encoder, fusion = (one == "l" for one in parts)
    words = {"l": "lora", "f": "frozen"}
    names = (f"{part}_trainable" for part in ("decoder", "encoder", "fusion"))
    said = dict(zip(names, (words[one] for one in parts), strict=True))
    attention = ["q_proj", "v_proj", "output_proj"]
    found = tune(**SEEING | {"model": MODEL | said | {"apply_lora_to_mlp": mlp, "apply_lora_to_output": output}})
    asked = run_config(adapter=found.config["adapter"], vision=found.config.get("vision", {}))
    notes, vision = Notes(), plan_vision(asked, facts, Notes())
    plan = plan_adapter(asked.adapter, facts, 0, notes, beside=adaptable(facts, vision))
    assert not notes.faults
    expected = with_lora(decoder, encoder, fusion, attention, mlp=mlp, output=output)
    assert set(plan.targets.value) == expected
    assert set(plan.targets.value) != with_lora(not decoder, encoder, fusion, attention, mlp=mlp, output=output)  # twin


def test_all_but_the_decoder_trains_in_full(facts):
    """As `DeepFusionModel` with get_fusion_params; the eight rows of <|image|> and its like stay frozen here."""
    found = tune(**FULL)
    assert found.config["vision"] == {"tower": "trained", "projector": "trained"}
    own = only_trained(run_config(model={"path": "m"} | found.config["model"]), facts)
    assert {one.name for one in own.modules} == {
        one.name for one in facts.modules if re.match(r"model\.language_model\.layers\.(3|8)(\.|$)", one.name)
    }
    assert "model.language_model.layers.3" in {one.name for one in own.modules}  # the gates
    whole = tune(**FULL | {"model": FULL["model"] | {"decoder_trainable": True}}).config
    assert "trained" not in whole["model"]
    assert whole["vision"] == found.config["vision"]
    assert refused(**FULL | {"model": FULL["model"] | {"encoder_trainable": False}}) == {"model.encoder_trainable"}


def test_what_learns_nothing_is_refused():
    """torchtune's other recipes of this model are on texts, with a frozen decoder."""
    texts = {"dataset": {"_component_": "torchtune.datasets.alpaca_cleaned_dataset"}}
    assert refused(**SEEING | texts) == {"model.decoder_trainable"}
    assert refused(**FULL | texts) == {"model.decoder_trainable"}
    found = tune(**SEEING | texts | {"model": MODEL | {"decoder_trainable": "lora"}})  # twin
    assert "vision" not in found.config
    frozen = {f"{part}_trainable": "frozen" for part in ("decoder", "encoder", "fusion")}
    assert refused(**SEEING | {"model": MODEL | frozen}) == {"model.decoder_trainable"}
    unnamed = {"_component_": SEEING["dataset"]["_component_"]}
    assert refused(**SEEING | {"dataset": unnamed}) == {"dataset.subset"}


def test_the_cauldron_is_the_source():
    source = tune(**SEEING).config["data"]["train"]
    assert source == {"path": "HuggingFaceM4/the_cauldron", "format": "cauldron", "subset": "ocrvqa"}
    own = SEEING["dataset"] | {"source": "org/own", "column_map": {"images": "pictures", "texts": "texts"}}
    assert tune(**SEEING | {"dataset": own}).config["data"]["train"]["columns"] == {"images": "pictures"}
    config = tune(**SEEING | {"model": MODEL | {"quantize_base": True}}).config
    assert (config["precision"]["base"], config["vision"]) == ("nf4", {"tower": "adapter"})


def tokenized(tokenizer, record):
    """Ids and learned tokens of TheCauldronToMessages and Llama3Tokenizer.tokenize_messages of torchtune (bd2a0fc)."""
    number = tokenizer.convert_tokens_to_ids
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    ids, learned = [number("<|begin_of_text|>")], [False]
    for place, pair in enumerate(record["texts"]):
        for role in ("user", "assistant"):
            header = [number("<|start_header_id|>"), *encode(role), number("<|end_header_id|>"), *encode("\n\n")]
            images = [number("<|image|>")] * len(record["images"]) if role == "user" and not place else []
            own = [*header, *images, *encode(pair[role].strip()), number("<|eot_id|>")]
            ids, learned = ids + own, learned + [role == "assistant"] * len(own)
    return [*ids, number("<|end_of_text|>")], [*learned, False]


def test_ids_and_learned_tokens_are_torchtunes_but_for_headers_and_a_masked_end(tmp_path):
    for colour, size in SIZES.items():
        picture(tmp_path / f"{colour}.png", colour, size)
    base = seeing_family("mllama", tmp_path / "base")
    pairs = [{"user": "Which is red?", "assistant": " the first ", "source": "x"}, {"user": "Why?", "assistant": "so"}]
    record = {"images": ["red.png", "blue.png"], "texts": pairs}
    found = prepared(base, tmp_path, [record], template=tune(**SEEING).config["data"]["template"]).train[0]
    tokenizer = AutoTokenizer.from_pretrained(base)
    ids, learned = tokenized(tokenizer, record)
    assert [*found.ids.tolist(), ids[-1]] == ids
    header = len(tokenizer("<|start_header_id|>assistant<|end_header_id|>\n\n", add_special_tokens=False)["input_ids"])
    begins = [place for place in range(1, len(ids)) if learned[place] and not learned[place - 1]]
    assert len(begins) == 2
    for place in begins:  # which torchtune learns as well
        learned[place : place + header] = [False] * header
    assert found.supervised.tolist() == learned[:-1]
    assert ids.count(tokenizer.convert_tokens_to_ids("<|image|>")) == 2
