"""The cost models of the transports, by hand, and the measurement they are fed with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from imbrex.cost.network import COSTS, Link, Load, Network, fastest

# One second a byte between nodes, a tenth inside; starting a message costs nothing.
FAST_INSIDE = Network(
    nodes=2, size=4, inside=Link(start=0.0, per_byte=0.1), across=Link(start=0.0, per_byte=1.0)
)
EVERY = Load(tokens=10, row_bytes=2, top_k=10_000)
"""So many choices that a token wants every rank: 20 bytes for each."""


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("alltoall", 80.0),  # 4 ranks on the other node; 6 seconds inside are hidden
        ("sequential", 86.0),
        ("2dh", 12.0 + 80.0),  # 3 peers, 40 bytes for each; then 80 bytes to the counterpart
        ("1dh", 2 * 48.0 + 80.0),
        ("hierarchical", 20.0 + 12.0 / 4),  # 20 bytes across; inside 3 peers, 40 bytes each, a quarter seen
    ],
)
def test_by_hand(name: str, seconds: float) -> None:
    assert COSTS[name](FAST_INSIDE, EVERY) == pytest.approx(seconds)


def test_a_token_with_one_choice_gains_nothing_from_crossing_once() -> None:
    one = Load(tokens=1024, row_bytes=4096, top_k=1)
    assert fastest(FAST_INSIDE, one)[0][0] == "alltoall"
    assert fastest(FAST_INSIDE, Load(tokens=1024, row_bytes=4096, top_k=8))[0][0] == "hierarchical"


def test_an_all_to_all_that_crowds_the_ports_is_left() -> None:
    """Four nodes of one rank: nothing is sent twice to a node, so only the crowd tells the two apart."""
    lone = Link(start=0.0, per_byte=0.0)
    four = Network(nodes=4, size=1, inside=lone, across=Link(start=1e-4, per_byte=8.5e-9))
    load = Load(tokens=1024, row_bytes=4096, top_k=8)
    assert fastest(four, load)[0][0] == "alltoall"
    assert fastest(replace(four, together=1.01), load)[0][0] == "alltoall"
    crowded = replace(four, together=1.4)
    assert fastest(crowded, load)[0][0] not in ("alltoall", "pipe")
    assert COSTS["alltoall"](crowded, load) == pytest.approx(1.4 * COSTS["alltoall"](four, load))
    assert COSTS["hierarchical"](crowded, load) == COSTS["hierarchical"](four, load)


def test_few_large_messages_where_starting_them_is_dear() -> None:
    slow = Network(
        nodes=8, size=8, inside=Link(start=1e-6, per_byte=1e-11), across=Link(start=1e-3, per_byte=1e-9)
    )
    names = [name for name, _ in fastest(slow, Load(tokens=4, row_bytes=256, top_k=1))]
    assert names.index("2dh") < names.index("alltoall")


def test_a_line_through_three_measurements() -> None:
    link = Link.through((2, 1000, 0.4), (10, 1000, 1.2), (2, 3000, 0.6))
    assert link.start == pytest.approx(0.1)
    assert link.per_byte == pytest.approx(1e-4)
    assert link.latency == pytest.approx(0.2)
    assert link(2, 500) == pytest.approx(0.2 + 0.2 + 0.05)
    assert link(0, 0) == 0.0


def test_what_was_measured_is_kept(tmp_path: Path) -> None:
    for network in (FAST_INSIDE, replace(FAST_INSIDE, together=1.5)):
        network.save(tmp_path / "network.json")
        assert Network.load(tmp_path / "network.json", 2, 4) == network
    with pytest.raises(ValueError, match="on 2 nodes of 4 ranks, these are 4 of 2; give another file"):
        Network.load(tmp_path / "network.json", 4, 2)
    (tmp_path / "network.json").write_text("{}")
    with pytest.raises(ValueError, match=r"network\.json holds no measurement of a network .*; remove it"):
        Network.load(tmp_path / "network.json", 2, 4)
