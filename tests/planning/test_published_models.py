"""Plans of published models for an H100, from their config.json alone, beside sums worked out by hand."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from helpers.published_configs import PUBLISHED, published
from surefoot.commands.main import main

RANK, GIB = 16, 2**30
DOCS = (Path(__file__).parents[2] / "docs/experts.md").read_text()


def lora(*layers: tuple[int, int]) -> int:
    """Parameters of A and B of linear layers (inputs, outputs)."""
    return RANK * sum(inputs + outputs for inputs, outputs in layers)


# Name -> weights, and parameters of an adapter, of each kind of layer.
_HYBRID = 10 * (2048 * 8192 + 2 * 2048 * 512 + 4096 * 2048) + 30 * (2048 * (8192 + 4096 + 2 * 32) + 4096 * 2048)
_HYBRID_ADAPTER = 10 * lora((2048, 8192), (2048, 512), (2048, 512), (4096, 2048)) + 30 * lora(
    (2048, 8192), (2048, 4096), (2048, 32), (2048, 32), (4096, 2048)
)
BY_HAND = {
    "Qwen3.5-35B-A3B": {
        # Besides the matrices: a convolution over queries, keys and values, and two numbers a head.
        "attention": (_HYBRID + 30 * (8192 * 4 + 2 * 32), _HYBRID_ADAPTER),
        "MLP": (40 * 3 * 2048 * 512, 40 * lora((2048, 512), (2048, 512), (512, 2048))),
        "experts": (40 * 256 * 3 * 2048 * 512, 40 * 256 * lora((2048, 1024), (512, 2048))),
        "router": (40 * (256 * 2048 + 2048), 0),
        "embeddings": (248320 * 2048, 0),
    },
    "gpt-oss-20b": {
        "attention": (24 * (2880 * 5120 + 5120 + 4096 * 2880 + 2880 + 64),
                      24 * lora((2880, 4096), (2880, 512), (2880, 512), (4096, 2880))),
        "experts": (24 * 32 * (2880 * 5760 + 5760 + 2880 * 2880 + 2880), 24 * 32 * lora((2880, 5760), (2880, 2880))),
        "router": (24 * 32 * 2881, 0),
        "embeddings": (201088 * 2880, 0),
    },
    "Qwen3-VL-8B": {
        "attention": (36 * 2 * 4096 * 5120, 36 * lora((4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096))),
        "MLP": (36 * 3 * 4096 * 12288, 36 * lora((4096, 12288), (4096, 12288), (12288, 4096))),
        "embeddings": (151936 * 4096, 0),
        "projector": (4 * (4608 * 4608 + 4608 + 4608 * 4096 + 4096) + 2 * 1152 + 3 * 2 * 4608, 0),
    },
}  # fmt: skip
# Of gpt-oss-20b `general.parameter_count` in its GGUF files, of Qwen3-VL-8B `safetensors.total` in the hub's API. The
# shapes of their layers, norms and heads included, sum to the same numbers.
TOTALS = {"gpt-oss-20b": 20_914_757_184, "Qwen3-VL-8B": 8_767_123_696}
# Bytes that a layer keeps of a token in bf16: inputs of four norms in fp32; queries, keys, values and output, with a
# number for each head; one input for layers that share it; gate, up and what the gate makes; A x of seven layers.
KEPT = (
    4 * (3 * 4096 + 1024) + 2 * (2 * 4096 + 2 * 1024) + 4 * 32 + 2 * (2 * 4096 + 12288) + 2 * 3 * 12288 + 2 * 7 * RANK
)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_plan_is_what_is_worked_out_by_hand(tmp_path, name):
    base = published(name, tmp_path / "base")
    data = tmp_path / "data.json"
    data.write_text(json.dumps([{"instruction": "a", "output": "b"}]))
    config = tmp_path / "run.yaml"
    config.write_text(
        f"stage: sft\nmodel: {base}\noutput: {tmp_path / 'run'}\nadapter: {{kind: lora, rank: {RANK}}}\n"
        f"data: {{train: {data}, max_length: 1024}}\nbatch: {{size: 16}}\nduration: 1 epoch\n"
    )
    frozen = name == "Qwen3.5-35B-A3B"  # an adapter on all its experts does not fit an H100
    words = ["plan", str(config), "--hardware", "h100", "--json"]
    if frozen:
        assert CliRunner().invoke(main, words).exit_code == 2
        words += ["adapter.experts=false"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    rows = {row["kind"]: row for row in plan["coverage"]}
    for kind, (weights, trained) in BY_HAND[name].items():
        expected = 0 if frozen and kind == "experts" else trained
        assert (rows[kind]["weights"], rows[kind]["trained"]) == (weights, expected), kind
    total, adapter = sum(row["weights"] for row in rows.values()), sum(row["trained"] for row in rows.values())
    assert total == TOTALS.get(name, total)
    memory = plan["memory"]
    # bf16 base, adapter in fp32 and its copy for the products; gradients 4 bytes, two moments.
    assert memory["weights"] == pytest.approx(2 * total + 6 * adapter, rel=1e-3)
    assert (memory["gradients"], memory["optimizer"]) == (4 * adapter, pytest.approx(8 * adapter, rel=1e-3))
    (row,) = re.findall(rf"^\| {re.escape(name)}[^|]* \|(.*)\|$", DOCS, flags=re.MULTILINE)
    reached = sum(trained for _, trained in BY_HAND[name].values())
    assert f"{total / 1e9:.2f}" in row
    assert f"{reached / 1e6:.1f}" in row
    assert f"{memory['weights'] / GIB:.1f} GiB" in row
    forecast = sum(memory[key] for key in ("weights", "gradients", "optimizer", "activations", "logits", "holes"))
    assert f"{(forecast - memory['apart']) / GIB:.1f} GiB in all" in row
    if name == "Qwen3-VL-8B":  # eight rows; half a layer besides while the last one runs backward
        assert memory["activations"] == pytest.approx(36.5 * 8 * 1024 * KEPT, rel=1e-3)
