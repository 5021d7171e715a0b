"""What every trainer rank needs; imported once, by the process that forks them."""

from megatron_bridge.runtime import device

device.prepare()

import tests.megatron.cases  # noqa: E402, F401
