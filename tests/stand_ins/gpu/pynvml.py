"""Describes a host with one H100 to processes that have this folder on PYTHONPATH."""

import sys

from tests.mesh.stand_in_nvml import Card, StandIn

sys.modules[__name__] = StandIn([Card("GPU-0", "NVIDIA H100 80GB HBM3", (9, 0), 81559)])
