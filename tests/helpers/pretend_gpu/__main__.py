"""python -m helpers.pretend_gpu COMMAND ...: run a command on the simulated GPU, or say why that is not possible."""

import os
import sys

from helpers import pretend_gpu

if obstacle := pretend_gpu.obstacle():
    print(f"no pretend GPU here: {obstacle}")
    sys.exit(0)
os.execvpe(sys.argv[1], sys.argv[1:], pretend_gpu.environment())
