"""Losses that weigh tokens, in other tools' configs."""

import pytest

from interop.axolotl_configs import CHAT, axolotl
from interop.small_configs import outcome, translated
from surefoot.system.errors import InputError


def test_llama_factory():
    found = translated("factory", use_dft_loss=True)
    assert found.config["sft"] == {"loss": "dft"}
    assert outcome(found, "use_dft_loss") == "changed"  # evaluations
    assert translated("factory", use_eaft_loss=True, eaft_alpha=0.5).config["sft"] == {"loss": "eaft", "alpha": 0.5}
    assert outcome(translated("factory", eaft_alpha=0.5), "eaft_alpha") == "listed"
    anchored = translated("factory", use_asft_loss=True, asft_alpha=0.05)
    assert anchored.config["sft"] == {"loss": "asft", "kl": 0.05}
    assert outcome(anchored, "use_asft_loss") == "changed"  # gradients are added up there
    assert outcome(translated("factory", asft_alpha=0.5), "asft_alpha") == "listed"
    for name, value in {"use_dft_loss": True, "ref_model": "other"}.items():
        with pytest.raises(InputError):
            translated("factory", use_asft_loss=True, **{name: value})


def test_axolotl():
    assert axolotl(**CHAT, use_eaft=True).config["sft"] == {"loss": "eaft", "entropy": 1.0}
    more = {"eaft_alpha": 2.0, "eaft_k": 5}
    assert axolotl(**CHAT, use_eaft=True, **more).config["sft"] == {
        "loss": "eaft", "alpha": 2.0, "top": 5, "entropy": 1.0,
    }  # fmt: skip
    assert "sft" not in axolotl(**CHAT, **more).config


def test_trl():
    assert translated("trl", loss_type="dft").config["sft"] == {"loss": "dft"}
    assert translated("trl", loss_type="chunked_nll").config["sft"] == {"loss": "cross_entropy"}
    with pytest.raises(InputError):
        translated("trl", loss_type="focal")
