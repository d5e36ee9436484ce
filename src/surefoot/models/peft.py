"""All imports from PEFT, in one place and in the right order.

PEFT imports bitsandbytes if it is installed, needed or not, and on import bitsandbytes prints messages and looks for
kernels on the hub. So bitsandbytes is imported first, in a way that prevents both. No other module imports PEFT.
"""

# ruff: noqa: F401 (imported for other modules)

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
