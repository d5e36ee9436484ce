from dataclasses import replace

import pytest

from layouts import LLAMA31_8B, model_facts
from surefoot.hardware import preset
from surefoot.planning.threads import plan_threads

NARROW = LLAMA31_8B | {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
WIDE = LLAMA31_8B
LAPTOP = replace(preset("cpu"), cores=8)


@pytest.mark.parametrize(
    ("config", "machine", "environment", "threads", "source"),
    [
        (NARROW, LAPTOP, {}, 1, "default"),
        (WIDE, LAPTOP, {}, 8, "hardware"),
        (NARROW, LAPTOP, {"OMP_NUM_THREADS": "8"}, 8, "user"),
        (NARROW, preset("h100"), {}, preset("h100").cores, "hardware"),
    ],
)
def test_threads(tmp_path, config, machine, environment, threads, source):
    choice = plan_threads(model_facts(tmp_path, config), machine, environment)
    assert (choice.value, choice.source) == (threads, source)
