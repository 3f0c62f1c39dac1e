"""Where lines are counted, what tests want of others is loaded first and not counted: tracing makes imports
twice as long, and every worker of a whole run makes them all to collect."""

import os
import sys
from contextlib import suppress
from importlib import import_module

from tests import tracing

LOADED = "hypothesis plotly.graph_objects torch._dynamo torch.distributed.checkpoint torch.distributed.tensor"
LOADED += " transformers.models.deepseek_v2.modeling_deepseek_v2"

# Torch's compiler tries vector instructions with g++ first: 16 of 36 s that its tests take in empty caches.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

if "coverage" in sys.modules and "PYTEST_XDIST_WORKER" in os.environ:
    with tracing.stopped():
        for name in LOADED.split():
            with suppress(ImportError):
                import_module(name)
