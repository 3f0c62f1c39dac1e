"""Everything that passes between the rooms: values, and protocols of the pieces that a user can replace.

Shape letters: T tokens of this rank, K top-k, N rows sent, M rows received, P = T + M rows in the pool,
R expert-major rows, D model width, F expert width, E experts, e local slots, S slots, W ranks.
"""

from imbrex.contracts.crossings import (
    Add,
    Addend,
    Arrived,
    Backend,
    Codec,
    Crossing,
    Pending,
    Transport,
    Wire,
)
from imbrex.contracts.layers import Dispatcher, Experts, Fusing, Heralding, Listener, RowExchange, Strategy
from imbrex.contracts.values import (
    VERSION,
    Dispatched,
    Geometry,
    Handle,
    Output,
    Placement,
    Plan,
    Roles,
    Routing,
    RowForm,
    Split,
    Traffic,
)

__all__ = [
    "VERSION",
    "Add",
    "Addend",
    "Arrived",
    "Backend",
    "Codec",
    "Crossing",
    "Dispatched",
    "Dispatcher",
    "Experts",
    "Fusing",
    "Geometry",
    "Handle",
    "Heralding",
    "Listener",
    "Output",
    "Pending",
    "Placement",
    "Plan",
    "Roles",
    "Routing",
    "RowExchange",
    "RowForm",
    "Split",
    "Strategy",
    "Traffic",
    "Transport",
    "Wire",
]
