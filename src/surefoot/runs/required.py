"""What a config asks for and only an optional library or a compiler can do, tried on this machine before it is
promised."""

from __future__ import annotations

from surefoot.config.schema import RunConfig
from surefoot.system.errors import EnvironmentFault, Fault
from surefoot.system.libraries import bitsandbytes_obstacle, compiler_obstacle

_INSTALL = "pip install 'surefoot[quant]'"


def require_libraries(config: RunConfig, kind: str) -> None:
    """kind: cpu | cuda | mps. Raises EnvironmentFault with the reason for each key that cannot be honoured here."""
    faults = []
    if config.optim.name == "adamw_8bit" and (obstacle := bitsandbytes_obstacle(kind)):
        faults.append(
            Fault("optim.name", f"adamw_8bit {obstacle}", f"{_INSTALL}, or use adamw or adafactor", code="SF-PACKAGE")
        )
    if config.precision.base == "nf4" and (obstacle := bitsandbytes_obstacle(kind)):
        faults.append(
            Fault("precision.base", f"nf4 {obstacle}", f"{_INSTALL}, or hold the base in 16 bits", code="SF-PACKAGE")
        )
    if config.compile != "off" and (obstacle := compiler_obstacle(kind)):
        faults.append(
            Fault(
                "compile",
                f"{config.compile} {obstacle}",
                "install one (such as g++), or set compile: off",
                code="SF-PACKAGE",
            )
        )
    if faults:
        raise EnvironmentFault(faults)
