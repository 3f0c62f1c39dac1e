"""Where lines are counted, what tests want of others is loaded first and not counted: tracing makes imports
twice as long, and every worker of a whole run makes them all to collect."""

import os
import sys
from contextlib import suppress
from importlib import import_module

from tests import tracing

LOADED = "hypothesis plotly.graph_objects torch._dynamo torch.distributed.checkpoint torch.distributed.tensor"
LOADED += " transformers.models.deepseek_v2.modeling_deepseek_v2"

if "coverage" in sys.modules and "PYTEST_XDIST_WORKER" in os.environ:
    with tracing.stopped():
        for name in LOADED.split():
            with suppress(ImportError):
                import_module(name)
