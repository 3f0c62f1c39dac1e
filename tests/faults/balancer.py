"""Faults of what moves experts: placements, splits and the balancer."""

from __future__ import annotations

from tests.faults.fault import Fault

BALANCER = [
    Fault(
        "only-the-first-moment-moves",
        "balancer/payload.py",
        "of the optimizer's state one tensor moves with an expert",
        '            tensors[f"{name}.{key}"] = value\n',
        '            tensors.setdefault(f"{name}.{next(iter(optimizer.state[parameter]))}", value)\n',
        ("unit/test_balancer_payload.py::test_optimizer_state_follows",),
    ),
    Fault(
        "state-stays-in-evaluations",
        "balancer/online.py",
        "experts that move in an evaluation leave their optimizer's state behind",
        "return training or (self.optimizer is not None and any(seat.parameters for seat in self.seats))",
        "return training",
        ("ranks/test_balancer.py::test_training_is_the_same_while_experts_and_optimizer_state_move",),
    ),
    Fault(
        "gradients-dropped-between-micro-batches",
        "balancer/seat.py",
        "experts move while their gradients wait for the optimizer",
        "return any(p.grad is not None and self._came.get(id(p)) == p._version for p in self.parameters)",
        "return False",
        ("ranks/test_balancer.py::test_training_is_the_same_while_experts_and_optimizer_state_move",),
    ),
    Fault(
        "weights-land-a-slot-off",
        "balancer/migration.py",
        "what arrives is written over the neighbour",
        "as_row(tensor, fetch.slot - first).copy_(row, non_blocking=True)",
        "as_row(tensor, fetch.slot - first - 1).copy_(row, non_blocking=True)",
        ("ranks/test_balancer.py::test_inference_is_the_same_while_weights_move",),
    ),
    Fault(
        "an-expert-from-afar",
        "placement/moves.py",
        "an expert that is on the rank already is fetched from another",
        "candidates = at_home or holders[expert]",
        "candidates = holders[expert]",
        ("unit/test_placement_renewal.py::test_an_expert_that_is_at_home_is_not_fetched_from_afar",),
    ),
    Fault(
        "remainders-pile-up",
        "placement/split.py",
        "the first replica takes what does not divide, of every rank",
        "extra = (number_S - source_W1) % replicas_S < counts_WS % replicas_S",
        "extra = number_S.expand(len(counts_WE), -1) < counts_WS % replicas_S",
        ("unit/test_plan.py::test_replicas_take_their_shares_in_slot_order",),
    ),
    Fault(
        "a-push-too-few",
        "placement/flow.py",
        "a fullest rank that is two above the emptiest is left as it is",
        "if loads[fullest] - loads[emptiest] < 2:",
        "if loads[fullest] - loads[emptiest] < 3:",
        ("unit/test_placement_split.py::test_balanced_is_the_optimum",),
    ),
    Fault(
        "even-shares-judged-as-balanced",
        "placement/online.py",
        "with even shares the balancer moves nothing where the balanced split would be even",
        """    if split == "balanced":
        return fullness(history_HE, replicas_WE)
""",
        """    if split:
        return fullness(history_HE, replicas_WE)
""",
        ("unit/test_placement_online.py::test_a_layer_is_judged_by_its_split",),
    ),
    Fault(
        "renumbered-whatever-the-slots",
        "placement/moves.py",
        "a rank of few slots gets the experts of one with many",
        "    shared[old_WE.sum(1)[:, None] != new_WE.sum(1)] = -1\n",
        "",
        ("unit/test_placement_renewal.py::test_ranks_are_renumbered_to_keep_what_they_hold",),
    ),
    Fault(
        "unequal-plans-are-used",
        "balancer/online.py",
        "ranks that planned different placements switch, each to its own",
        "if Vote.MOVING not in votes and len({checksum for",
        "if not votes and len({checksum for",
        ("ranks/test_balancer.py::test_what_cannot_be_balanced_says_so_on_every_rank",),
    ),
    Fault(
        "settling-is-a-failure",
        "balancer/online.py",
        "the balancer stops where weights are replaced often",
        "        if intended:\n            return\n",
        "",
        ("ranks/test_balancer.py::test_settling_is_no_failure",),
    ),
    Fault(
        "a-data-group-that-waits-is-a-failure",
        "balancer/renewal.py",
        "the balancer stops where the other data groups have no tokens for some steps",
        "    if not common:\n        return []\n",
        "",
        ("unit/test_balancer_counts.py::test_a_plan_waits_for_nothing_where_there_is_nothing",),
    ),
]
