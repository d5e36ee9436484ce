from dataclasses import replace

import pytest

from helpers.model_layouts import LLAMA31_8B, model_facts
from surefoot.planning.threads import plan_threads, requested_threads
from surefoot.system.hardware import preset

NARROW = LLAMA31_8B | {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
WIDE = LLAMA31_8B
LAPTOP = replace(preset("cpu"), cores=8)


@pytest.mark.parametrize(
    ("config", "machine", "environment", "threads", "source"),
    [
        (NARROW, LAPTOP, {}, 1, "default"),
        (WIDE, LAPTOP, {}, 8, "hardware"),
        (NARROW, LAPTOP, {"OMP_NUM_THREADS": "8"}, 8, "user"),
        (NARROW, LAPTOP, {"OMP_NUM_THREADS": "8,1"}, 8, "user"),  # OpenMP's list, by level
        (NARROW, LAPTOP, {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "8"}, 8, "user"),
        (NARROW, LAPTOP, {"OMP_NUM_THREADS": "16"}, 8, "hardware"),  # more than there are
        (NARROW, LAPTOP, {"OMP_NUM_THREADS": "abc"}, 1, "default"),  # asks for nothing
        (WIDE, LAPTOP, {"OMP_NUM_THREADS": "0", "MKL_NUM_THREADS": "-1"}, 8, "hardware"),
        (NARROW, preset("h100"), {}, preset("h100").cores, "hardware"),
    ],
)
def test_threads(tmp_path, config, machine, environment, threads, source):
    choice = plan_threads(model_facts(tmp_path, config), machine, environment)
    assert (choice.value, choice.source) == (threads, source)


@pytest.mark.parametrize(
    ("config", "rates", "environment", "threads", "source"),
    [
        (WIDE, {1: 10.0, 2: 20.0, 4: 30.0, 8: 12.0}, {}, 4, "measured"),  # a container that may use four of eight
        (WIDE, {1: 10.0, 2: 20.0, 4: 30.0, 8: 29.0}, {}, 8, "hardware"),  # no clear gain
        (WIDE, {1: 10.0, 4: 30.0, 8: 12.0}, {"OMP_NUM_THREADS": "8"}, 8, "user"),
        (WIDE, {1: 10.0, 4: 30.0, 8: 12.0}, {"OMP_NUM_THREADS": "abc"}, 4, "measured"),
        (NARROW, {4: 30.0, 8: 12.0}, {}, 1, "default"),
        (WIDE, {}, {}, 8, "hardware"),
    ],
)
def test_fewer_threads_are_taken_for_a_clear_gain_alone(tmp_path, config, rates, environment, threads, source):
    choice = plan_threads(model_facts(tmp_path, config), LAPTOP, environment, rates)
    assert (choice.value, choice.source) == (threads, source)


@pytest.mark.parametrize(
    ("value", "count"),
    [("2", 2), (" +2 ", 2), ("2,4", 2)]
    + [(value, None) for value in ("", "0", "-1", "abc", "2x", "2,x", "2.0", "٢", "9" * 5000)],
)
def test_what_openmp_takes_for_a_number_of_threads(value, count):
    assert requested_threads(value) == count
