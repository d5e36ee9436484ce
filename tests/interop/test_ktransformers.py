"""KTransformers computes experts on the CPU and trains adapters on them and on the routers; the rest is the plan's."""

import pytest

from helpers.faults import refused_settings
from interop.small_configs import outcome, text_of, translated
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_file

BF16 = {"kt_expert_weight_format": "bf16", "kt_backend": "AMXBF16", "kt_num_threads": 8}
KT = {"use_kt": True, "kt_config": BF16}


def test_experts_and_routers_get_adapters():
    found = translated("factory", lora_target="all", kt_cpu_activation="retain", **KT)
    adapter = found.config["adapter"]
    assert (adapter["targets"], adapter["experts"], adapter["router"]) == ("all-linear", True, True)
    assert outcome(found, "use_kt") == "changed"  # gate and up of an expert share A here
    assert translated("factory", lora_target="q_proj", **KT).config["adapter"]["router"] is False
    off = translated("factory", use_kt=False, kt_weight_path="p")
    assert (off.config["adapter"].keys() & {"experts", "router"}, outcome(off, "kt_weight_path")) == (set(), "listed")


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ({"kt_config": {"kt_expert_weight_format": "int8"}}, "kt_config"),
        ({"kt_config": {"kt_backend": "AMXINT8"}}, "kt_config"),
        ({"kt_weight_path": "experts"}, "kt_weight_path"),
        ({"kt_use_lora_experts": True}, "kt_use_lora_experts"),
        ({"finetuning_type": "full"}, "use_kt"),
    ],
)
def test_experts_in_other_numbers_are_refused(words, refused):
    text = text_of("factory", **{**KT, **words})
    assert refused_settings(lambda: translate_file("l.json", text, [], Options()), text=text) == [refused]
