"""What is used of PEFT, imported once and in the right order.

PEFT imports bitsandbytes wherever it is installed, needed or not, and bitsandbytes writes to the screen and looks for
kernels on the hub when it is imported. So bitsandbytes comes first, without either. Nothing else imports PEFT.
"""

# ruff: noqa: F401 (all of it is for others to import from here)

from __future__ import annotations

from surefoot.system.libraries import import_bitsandbytes, is_installed

if is_installed("bitsandbytes"):
    import_bitsandbytes()

from peft import (
    LoraConfig,
    PeftModel,
    TaskType,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.integrations import dequantize_module_weight
from peft.utils.other import ModulesToSaveWrapper
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
