"""The control port must not be open to others without a token."""

import re
from collections.abc import Iterator

from hybridflow.recipe.checks.context import Check, Context
from hybridflow.recipe.faults import Fault

_VARIABLE = re.compile(r"[A-Za-z_]\w*")


def control_faults(context: Context) -> Iterator[Fault]:
    """A port that others reach without a token; a variable that cannot be one."""
    control = context.recipe.control
    if control is None:
        return
    if not control.is_loopback and control.token_env is None:
        what = f"control.host={control.host} opens the port to other machines, without a token"
        fix = "set control.token_env to a variable that holds one, or host to 127.0.0.1"
        yield context.fault("control.host", what, fix)
    if control.token_env is not None and not _VARIABLE.fullmatch(control.token_env):
        what = "control.token_env does not name an environment variable"
        yield context.fault("control.token_env", what, "write its name, such as HYBRIDFLOW_TOKEN")


CHECKS = (Check(("control",), control_faults),)
