"""What a vision tower keeps for its backward pass, against the tensors that autograd saves in transformers' own."""

from dataclasses import replace

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from helpers.wrappers import WRAPPERS
from surefoot.models.facts import facts_of
from surefoot.planning.measurements import LengthFacts
from surefoot.planning.notes import Notes
from surefoot.planning.plan import ParallelPlan
from surefoot.planning.vision import NOTHING, TrainedVision, check_calls, picture_bytes
from surefoot.planning.workload import _products

# Rotary tables, rows' statistics and the norm behind the last layer are not counted; these towers are narrow.
NEAR = 0.1
WIDE = {"hidden_size": 64, "intermediate_size": 256}
# By family: sizes of the tower, its input for one picture, and how many image tokens that has.
PICTURES = {
    "qwen2_5_vl": (
        {"depth": 3, "num_heads": 4, "fullatt_block_indexes": [2]},
        lambda: {"hidden_states": torch.randn(64, 1176), "grid_thw": torch.tensor([[1, 8, 8]])},
        16,
    ),
    "gemma3": (
        {"num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 64, "vision_use_head": False},
        lambda: {"pixel_values": torch.randn(1, 3, 64, 64)},
        4,
    ),
    "mllama": (
        {"num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 4, "image_size": 64}
        | {"vision_output_dim": 128},
        lambda: {
            "pixel_values": torch.randn(1, 1, 4, 3, 64, 64),
            "aspect_ratio_ids": torch.tensor([[6]]),
            "aspect_ratio_mask": torch.ones(1, 1, 4, dtype=torch.long),
        },
        1,
    ),
    "internvl": (
        {"num_hidden_layers": 3, "num_attention_heads": 4, "image_size": [32, 32]},
        lambda: {"pixel_values": torch.randn(1, 3, 32, 32)},
        16,
    ),
    "lfm2_vl": (
        {"num_hidden_layers": 3, "num_attention_heads": 4},
        lambda: {
            "pixel_values": torch.randn(1, 64, 3 * 64),
            "pixel_attention_mask": torch.ones(1, 64, dtype=torch.int32),
            "spatial_shapes": torch.tensor([[8, 8]]),
        },
        16,
    ),
    "llama4": (
        {"num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 64},
        lambda: {"pixel_values": torch.randn(1, 3, 64, 64)},
        16,
    ),
    "glm46v": (
        {"depth": 3, "num_heads": 4, "out_hidden_size": 256},
        lambda: {"hidden_states": torch.randn(64, 2 * 3 * 64), "grid_thw": torch.tensor([[1, 8, 8]])},
        16,
    ),
    "paddleocr_vl": (
        {"num_hidden_layers": 3, "num_attention_heads": 4},
        lambda: {"pixel_values": torch.randn(1, 64, 3, 8, 8), "grid_thw": torch.tensor([[1, 8, 8]])},
        16,
    ),
}


def config_of(name):
    text, eye, others = WRAPPERS[name]
    return CONFIG_MAPPING[name](
        text_config=text | {"vocab_size": 64, "pad_token_id": 0}, vision_config=eye | WIDE | PICTURES[name][0], **others
    )


def saved(config, picture):
    """Of the tower's forward pass."""
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").train()
    names, inside = ("visual", "vision_tower", "vision_model"), getattr(model, "model", model)
    return saved_by(next(getattr(inside, name) for name in names if hasattr(inside, name)), picture)


def saved_by(module, inputs):
    """Bytes of all that autograd saves in a module's forward pass, weights left out."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    found = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = module(**inputs)
    assert result is not None  # holds the graph, so that no address is used twice
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("name", PICTURES)
def test_a_trained_tower_keeps_what_autograd_saves(tmp_path, name):
    config = config_of(name)
    config.save_pretrained(tmp_path)
    model, picture, features = facts_of(tmp_path), PICTURES[name][1](), PICTURES[name][2]
    expected = saved(config, picture)
    trained = picture_bytes(model, ["tower"], features, 0, 4)
    assert trained.once == pytest.approx(expected, rel=NEAR)
    assert trained.recomputed < trained.once
    assert picture_bytes(replace(model, cross_layers=()), [], features, 0, 4) == NOTHING  # frozen
    # Twin: without the MLP's layers the count is wrong.
    without = replace(model, vision=tuple((key, shape) for key, shape in model.vision if ".mlp." not in key))
    assert picture_bytes(without, ["tower"], features, 0, 4).once != pytest.approx(expected, rel=NEAR)


@pytest.mark.parametrize(("parts", "each"), [((), 4), (("tower",), 9)])
def test_products_of_a_tower_are_counted_by_the_shapes_of_its_matrices(tmp_path, parts, each):
    config_of("gemma3").save_pretrained(tmp_path)
    model, vision = facts_of(tmp_path), TrainedVision(parts=parts)
    words, pictures = (LengthFacts(longest=9, typical=9, pictures=seen) for seen in (False, True))
    # 64 x 64 of attention, both of the MLP, and the projector's.
    assert _products(model, None, vision, pictures) - _products(model, None, vision, words) == 4 * each
    assert _products(model, None, vision, words) > 0
    assert _products(model, None, vision, None) == 0


@pytest.mark.parametrize(
    ("family", "stage", "pictures", "count"),
    [("lfm2_vl", 3, True, 1), ("lfm2_vl", 2, True, 0), ("lfm2_vl", 3, False, 0), ("gemma3", 3, True, 0)],
)
def test_a_projector_that_is_called_for_each_tile_is_not_sharded_by_zero(tmp_path, family, stage, pictures, count):
    config_of("gemma3").save_pretrained(tmp_path)
    model, notes = replace(facts_of(tmp_path), model_type=family), Notes()
    check_calls(ParallelPlan(zero_stage=stage), model, LengthFacts(longest=9, typical=9, pictures=pictures), notes)
    assert [one.where for one in notes.faults] == ["parallel.zero_stage"] * count


def test_cross_attention_keeps_what_autograd_saves(tmp_path):
    """Beyond what each token of the text keeps in a layer, which is taken from two lengths of text."""
    config = config_of("mllama")
    config.text_config.update({"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2})
    config.save_pretrained(tmp_path)
    model = facts_of(tmp_path)
    layers = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").model.language_model.layers
    layer, states = layers[config.text_config.cross_attention_layers[0]], torch.randn(1, 260, 64)

    def kept(tokens):
        mask = torch.zeros(1, 1, tokens, 260)
        text = torch.randn(1, tokens, 64, requires_grad=True)
        return saved_by(
            layer,
            {"cross_attention_states": states, "cross_attention_mask": mask, "attention_mask": None}
            | {"hidden_states": text, "full_text_row_masked_out_mask": torch.ones(1, 1, tokens, 1)},
        )

    two = [kept(tokens) for tokens in (16, 32)]
    once = replace(model, patches=260, cross_layers=("one",))
    expected = [picture_bytes(once, [], 1, tokens, 4).once for tokens in (16, 32)]
    of_text = (two[1] - two[0]) - (expected[1] - expected[0])  # of 16 tokens
    assert two[0] - of_text == pytest.approx(expected[0], rel=NEAR)
    assert two[0] - of_text != pytest.approx(picture_bytes(replace(once, heads=2), [], 1, 16, 4).once, rel=NEAR)  # twin
    assert picture_bytes(replace(once, cross_layers=()), [], 1, 16, 4) == NOTHING
