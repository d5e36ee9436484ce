"""The process that test processes are forked from. It imports everything and fills tables that libraries build at first
use, but computes nothing.

Preloaded by the fork server of multiprocessing (`tests/distributed/two_ranks.py`, `tests/helpers/forked_command.py`).
"""

import gc

from surefoot.system import process

gc.disable()  # nothing that is imported is garbage, looking for which takes a third of the time

process.quiet_sockets()  # ranks do so before they import torch

import matplotlib.backends.backend_agg  # noqa: E402
import matplotlib.figure  # noqa: E402, F401
import pytest  # noqa: E402, F401
import transformers.models.llama.modeling_llama  # noqa: E402, F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping  # noqa: E402

import surefoot.commands.launching  # noqa: E402
import surefoot.commands.train  # noqa: E402
import surefoot.runs.run  # noqa: E402, F401
from surefoot.data.tokenize.cache import code_digest  # noqa: E402
from surefoot.report.html import _templates  # noqa: E402
from surefoot.system.libraries import import_deepspeed, is_installed  # noqa: E402

if is_installed("deepspeed"):
    import_deepspeed("cpu")

get_checkpoint_conversion_mapping("llama")  # of all families at once
code_digest()  # and the versions of all libraries
for name in _templates().list_templates(["html"]):
    _templates().get_template(name)

gc.freeze()  # else each child's collector walks through all libraries, and copies the pages it walks over
gc.enable()
