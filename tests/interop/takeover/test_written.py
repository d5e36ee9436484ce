"""TRL's own parser reads what `export --as trl` writes. Skips without TRL; `make takeover` installs it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import HfArgumentParser

from interop.test_export import RECIPES, config_of, written
from surefoot.config.yaml_reader import parse_value

trl = pytest.importorskip("trl")
KINDS = {"sft": trl.SFTConfig, "dpo": trl.DPOConfig, "kto": trl.KTOConfig, "reward": trl.RewardConfig}
OF_A_GPU = {"use_cpu": True, "bf16": False}  # TRL refuses bf16 without one


def settings(path: Path, **keys: object) -> tuple[str, dict[str, object]]:
    """The method and the settings that are written for a recipe."""
    found = written("trl", config_of({**parse_value(path.read_text(), ""), **keys}))
    return found.command.split()[1], parse_value(found.text, "")


def parsed(method: str, given: dict[str, object]) -> dict[str, object]:
    parser = HfArgumentParser((trl.ScriptArguments, KINDS[method], trl.ModelConfig, trl.DatasetMixtureConfig))
    return {name: value for part in parser.parse_dict({**given, **OF_A_GPU}) for name, value in vars(part).items()}


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_trl_reads_every_value(path: Path) -> None:
    if parse_value(path.read_text(), "")["stage"] in ("ppo", "grpo", "distill"):
        pytest.skip("not one of TRL's commands, or with arguments of the script's own")
    method, given = settings(path)
    read = parsed(method, given)
    plain = {name: value for name, value in given.items() if isinstance(value, int | float | bool)}
    assert len(plain) > 5
    assert {name: read[name] for name in plain.keys() - OF_A_GPU.keys()} == {
        name: value for name, value in plain.items() if name not in OF_A_GPU
    }


def test_twin_a_setting_that_trl_lacks_is_refused_by_it() -> None:
    method, given = settings(RECIPES / "sft-llama3-8b-lora.yaml")
    with pytest.raises(ValueError, match="warmup_ratio"):
        parsed(method, {**given, "warmup_ratio": 0.03})
