"""The file that holds the factor: its keys, and what is refused when it is read."""

import json

import pytest

from helpers.faults import gives, raises_fault
from surefoot.families.bos_zero import BOS_FILE, bos_file, read_bos_scale
from surefoot.system.errors import InputError

ORIGINAL = {
    "add_bos_token": True,
    "zero_bos_embedding": True,
    "description": "Model trained with BOS tokens and zeroed embeddings",
    "trainer_class": "BOSZeroTrainer",
}


def written(folder, content):
    (folder / BOS_FILE).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize("scale", [0.0, 0.1, 2.5, 1 / 3])
def test_what_is_written_is_read(tmp_path, scale):
    assert read_bos_scale(written(tmp_path, bos_file(scale, 7))) == scale


def test_the_keys_of_the_original_stand_in_it():
    content = bos_file(0.1)
    assert {key: content[key] for key in ORIGINAL if key != "description"} == {
        key: ORIGINAL[key] for key in ORIGINAL if key != "description"
    }
    assert set(content) == {*ORIGINAL, "scaling_factor"}
    assert set(bos_file(0.1, 500)) - set(content) == {"global_step"}
    assert bos_file(0.1, 500)["global_step"] == 500


def test_without_a_file_nothing_is_scaled(tmp_path):
    assert read_bos_scale(tmp_path) is None
    assert read_bos_scale(written(tmp_path, bos_file(0.1) | {"zero_bos_embedding": False})) is None


def test_an_original_without_a_factor_is_refused_and_told_how(tmp_path):
    with pytest.raises(InputError) as caught:
        read_bos_scale(written(tmp_path, ORIGINAL))
    (fault,) = caught.value.faults
    assert fault.where.endswith(BOS_FILE)
    assert gives(fault.what, "scaling_factor")
    assert '"scaling_factor": 0.1' in fault.fix
    assert read_bos_scale(written(tmp_path, ORIGINAL | {"scaling_factor": 0.1})) == 0.1  # twin: as it tells


@pytest.mark.parametrize("factor", ["0.1", True, -0.1, [0.1], float("nan"), float("inf")])
def test_what_is_no_factor_is_refused(tmp_path, factor):
    with raises_fault("SF-BOS", f"{tmp_path}/bos_zero_config.json: scaling_factor"):
        read_bos_scale(written(tmp_path, bos_file(0.1) | {"scaling_factor": factor}))


def test_a_torn_file_is_refused(tmp_path):
    with raises_fault("SF-FILE-UNREADABLE", f"{tmp_path}/bos_zero_config.json:1:21"):
        read_bos_scale(written(tmp_path, '{"scaling_factor": 0.'))
