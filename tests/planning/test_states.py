"""Layers that pass on several states (Gemma 3n): the forecast against what autograd really keeps."""

from dataclasses import replace

import pytest

from planning.test_memory import LORA, ROWS, TOKENS, _cast_per_layer, _kept, mixture, workload
from surefoot.planning.memory import layer_bytes

TOLERANCE = 0.03  # row statistics, and coefficients of the states
LAYERS = 4


def config(layers: int, sparse: float) -> dict[str, object]:
    return {
        "model_type": "gemma3n_text",
        "hidden_size": 128,
        "intermediate_size": [512] * layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 64,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [sparse, 0.0] * (layers // 2),
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
        "max_position_embeddings": 512,
    }


@pytest.mark.parametrize(("adapter", "precision", "sparse"), [(None, "fp32", 0.0), (LORA, "bf16", 0.9)])
def test_activations_of_layers_with_several_states(tmp_path, adapter, precision, sparse):
    model = mixture(tmp_path, config(LAYERS, sparse))
    assert (model.states, model.sparse) == (4, 0.5 if sparse else 0)
    work = workload(tmp_path, adapter=adapter, precision=precision, model=model)
    deep, shallow = (_kept(work, adapter, "flash", config(layers, sparse), layers) for layers in (LAYERS, 2))
    casts = work.width * _cast_per_layer(work) if work.autocast else 0  # counted among the weights
    kept = (deep - shallow) / (LAYERS - 2) - casts
    assert layer_bytes(work, ROWS * TOKENS, TOKENS) == pytest.approx(kept, rel=TOLERANCE)
    for wrong in ({"states": 1}, *([{"sparse": 0.0}] if sparse else [])):
        one = replace(work, model=replace(work.model, **wrong))
        assert layer_bytes(one, ROWS * TOKENS, TOKENS) != pytest.approx(kept, rel=TOLERANCE)
