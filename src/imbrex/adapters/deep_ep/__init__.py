"""DeepEP's interfaces on top of imbrex: its first one, `Buffer`; V2's `ElasticBuffer` in its compact mode;
and NVIDIA's `HybridEPBuffer`.

    import imbrex.adapters.deep_ep
    imbrex.adapters.deep_ep.install()      # from then on `import deep_ep` finds this package
    from deep_ep import Buffer, HybridEPBuffer

They run on every process group: gloo on CPUs, NCCL on GPUs.
"""

from imbrex.adapters.deep_ep.config import Config
from imbrex.adapters.deep_ep.elastic import ElasticBuffer, EPHandle
from imbrex.adapters.deep_ep.events import EventHandle, EventOverlap
from imbrex.adapters.deep_ep.hybrid import HybridEPBuffer, indices_to_map
from imbrex.adapters.deep_ep.installing import install
from imbrex.adapters.deep_ep.legacy import Buffer, topk_idx_t

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "indices_to_map",
    "install",
    "topk_idx_t",
]
