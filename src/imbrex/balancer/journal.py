"""What happened, a JSON line for every step: from it come reports and statistics."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import numpy as np

from imbrex.balancer.seat import Seat
from imbrex.balancer.tally import Tally


def append(
    path: str | os.PathLike[str], seats: Sequence[Seat], tally: Tally, switched: Sequence[int]
) -> None:
    """Add the step that has just ended.

    layers: numbers. expert_load [L, E]: choices of all ranks. loads [L, W]: choices computed.
    crossings [W, W]: choices of a rank's tokens by the rank that computed them, over all layers.
    switched: layers that have a new placement from here on. predicted [L]: the balancedness that their plan
    promised, 0 before the first. Then the tally.
    """
    # on the host: counts are numpy arrays there
    line = {
        "step": int(tally.values["iterations"]) - 1,
        "layers": [seat.number for seat in seats],
        "expert_load": [seat.last_counts_E.tolist() for seat in seats],
        "loads": [seat.last_loads_W.tolist() for seat in seats],
        "crossings": np.sum([seat.last_crossings_WW for seat in seats], axis=0).tolist(),
        "switched": list(switched),
        "predicted": [round(seat.predicted, 5) for seat in seats],
        **tally.values,
    }
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
