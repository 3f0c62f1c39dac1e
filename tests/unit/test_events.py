"""Patience that is learnt, and messages that wait for nobody."""

from __future__ import annotations

import math
import random

from imbrex.overlap.events.seat import Patience


def test_a_learnt_tau_gives_up_no_more_than_its_share() -> None:
    patience = Patience("p90")
    assert patience.seconds == math.inf
    for _ in range(20):
        patience.remember(0.01)
    assert patience.seconds == 0.01
    given_up, drawn = 0, random.Random(0)
    for step in range(400):
        late_s = 0.5 + drawn.random() if step % 4 == 0 else 0.02
        given_up += patience.seconds < late_s
        patience.remember(math.inf if patience.seconds < late_s else late_s)
        assert sum(map(math.isinf, patience.waits)) <= 0.1 * len(patience.waits)
    # A quarter of the waits is long; a tenth of all, the longest, may be given up.
    assert 10 <= given_up <= 44


def test_a_fixed_tau_forgets_nothing_that_matters() -> None:
    patience = Patience(0.5)
    patience.remember(math.inf)
    assert patience.seconds == 0.5
