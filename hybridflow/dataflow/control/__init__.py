"""The control port of a running run: live values, metrics and health over HTTP."""

from hybridflow.dataflow.control.open import announced, listening
from hybridflow.dataflow.control.prometheus import totals_of
from hybridflow.dataflow.control.pulse import Pulse, StepRecord
from hybridflow.dataflow.control.routes import Routes

__all__ = ["Pulse", "Routes", "StepRecord", "announced", "listening", "totals_of"]
