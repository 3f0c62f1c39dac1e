"""Faults of what overlaps: kernels that move rows beside a product, events, and their simulation."""

from __future__ import annotations

from tests.faults.fault import Fault

FUSED = [
    Fault(
        "flags-of-pieces-on-some-ranks",
        "exchange/nvlink.py",
        "a rank whose experts leave nothing sums in other pieces than its peers",
        "pieces = self._pieces(self.read_state(state)) if self.fuses else None",
        "pieces = None",
        ("ranks/test_fused.py::test_sums_go_home_beside_down",),
    ),
    Fault(
        "fused-token-at-its-lowest-row-only",
        "kernels/fused/movers.cuh",
        "a token whose experts share a rank is stored for the first of them alone",
        "for (u32 to = wanted; to; to &= to - 1) {",
        "for (u32 to = wanted & -wanted; to; to &= to - 1) {",
        ("unit/test_rows_out.py::test_bits_of_a_pull_and_a_product",),
    ),
    Fault(
        "fused-one-result-for-both-products",
        "kernels/fused/home.cu",
        "the second weight's gradient is stored over the first's",
        "ptx::tma_store_3d(map_d + tile.together, panel, column, row, tile.expert);",
        "ptx::tma_store_3d(map_d, panel, column, row, tile.expert);",
        ("unit/test_home_beside_gradients.py::test_bits_are_those_of_three_launches",),
    ),
    Fault(
        "no-numbers-of-no-rows",
        "kernels/exchange/launches.py",
        "a rank without rows leaves the gradients of its gate weights unwritten",
        "values=numbers if numbers is None or numbers.numel() else home,",
        "values=numbers,",
        ("ranks/test_fused.py::test_rows_are_exactly_as_many_as_there_are",),
    ),
]

TUNING = [
    Fault(
        "each-rank-reads-for-itself",
        "overlap/tuner.py",
        "a rank decides by its own file, not by the first rank's",
        "answer = json.loads(spread(self.gather, text, leads=self.leads))",
        "spread(self.gather, text, leads=self.leads)\n        answer = json.loads("
        "self._text(decision, parse))",
        ("ranks/test_tuning.py::test_ranks_run_what_the_first_has_kept",),
    ),
    Fault(
        "tuned-whatever-the-tokens",
        "overlap/tuner.py",
        "what was measured of few tokens serves many",
        '"tokens": bucket(max(tokens_W))',
        '"tokens": 0',
        ("ranks/test_tuning.py::test_a_kept_result_is_not_measured_again",),
    ),
    Fault(
        "result-of-another-subject",
        "overlap/tunings.py",
        "a file under another's name is taken for its result",
        'if (content["decision"], content["subject"]) != (decision, subject):',
        "if False:",
        ("unit/test_tunings.py::test_what_is_no_result_is_ignored_with_a_sentence",),
    ),
    Fault(
        "fused-however-slow-as-called",
        "overlap/auto.py",
        "fused is taken where the device alone gains, and calls take longer",
        "return gains.device >= FUSED_GAIN and gains.called >= FUSED_CALLED",
        "return gains.device >= FUSED_GAIN",
        ("ranks/test_fused.py::test_auto_takes_it_where_it_is_faster",),
    ),
    Fault(
        "graph-forgets-what-was-added",
        "exchange/layer_op.py",
        "in a compiled fused layer no gradient reaches what was added to the outputs",
        "d_addend = d_y_TD if ctx.has_addend else None",
        "d_addend = None",
        ("ranks/test_fused.py::test_a_compiled_graph_runs_fused",),
    ),
]

EVENTS = [
    Fault(
        "events-reply-without-a-claim",
        "kernels/events/events.cu",
        "a host believes that its reply counts, whether the home has given up on it or not",
        "reply[call.me], call.epoch, 1, before);",
        "reply[call.me], call.epoch, 1, before) || true;",
        ("unit/test_events_kernels.py::test_whoever_is_late_is_done_without",),
    ),
    Fault(
        "events-packet-over-one-that-is-read",
        "kernels/events/events.cu",
        "a packet is written before its host has read the last one",
        "{ return reached(ptx::load_acquire_sys(&own.taken[p]), own.sent[p]); };",
        "{ return true; };",
        ("unit/test_events_kernels.py::test_whoever_is_late_is_done_without[case1-2]",),
    ),
    Fault(
        "events-backward-of-all-that-came",
        "kernels/events/events.cu",
        "a host's backward waits for homes that do without its reply",
        "const u32 peers = peers_of(call, e, kServed);",
        "const u32 peers = peers_of(call, e, kCame);",
        ("unit/test_events_kernels.py::test_backwards_are_of_what_counted",),
    ),
    Fault(
        "events-piece-that-counts-alone",
        "kernels/events/events.cu",
        "a host's gradients are of rows that their home dropped for lack of the rank that shares its experts",
        "= {counted >> p & 1 ? e.tokens : kNothing, e.note};",
        "= {e.tokens, e.note};",
        (
            "unit/test_events_kernels.py::test_launches_in_order",
            "unit/test_events_kernels.py::test_backwards_are_of_what_counted",
        ),
    ),
    Fault(
        "events-gradients-of-what-memory-held",
        "kernels/events/events.cu",
        "a backward that has failed gives the experts whatever stood in memory for gradients",
        "const int tokens = here == 0 || (here >> w & 1) ? e.tokens_of[w] : 0;",
        "const int tokens = here >> w & 1 ? e.tokens_of[w] : 0;",
        ("unit/test_events_kernels.py::test_who_dies_in_a_backward_leaves_no_gradients[0-the packet]",),
    ),
    Fault(
        "events-lanes-that-part-where-a-reply-begins",
        "kernels/events/events.cu",
        "some lanes of a warp leave a failed call, and the others wait for them",
        "const u32 here = warp_failed(call) ? 0 : own.ranks[kPackets];",
        "const u32 here = failed(call) ? 0 : own.ranks[kPackets];",
        ("unit/test_events_kernels.py::test_a_wrong_input_ends_the_calls_of_all_ranks",),
    ),
    Fault(
        "events-gradients-of-rows-in-vain",
        "overlap/events/device.py",
        "the gradients of weights are not those of the mask where rows were computed in vain",
        "return bool((came_W > served_W).any())",
        "return False",
        ("ranks/test_events_nvlink.py::test_a_late_rank_is_done_without_and_its_mask_replays_to_the_bit",),
    ),
    Fault(
        "events-device-learns-the-next-wait",
        "kernels/events/claims.cuh",
        "a GPU's patience is the wait behind the quantile that is asked for",
        "if (lane + 32 * i < count && before[i] == at) {",
        "if (lane + 32 * i < count && before[i] == at + 1) {",
        ("unit/test_events_kernels.py::test_patience_that_is_learnt",),
    ),
    Fault(
        "silence-sixty-times-as-long",
        "overlap/events/seat.py",
        "a peer on whom all give up in every call is lost after minutes",
        "if now - since > self.timeout_s:",
        "if now - since > 60 * self.timeout_s:",
        ("ranks/test_events.py::test_who_stays_silent_is_lost_however_patient_the_others_are",),
    ),
    Fault(
        "refusal-taken-for-a-reply",
        "overlap/events/ledger.py",
        "a host that gave up on a packet counts as one that answered it",
        "self.home[peer] = Home.COUNTS if kind is Kind.REPLY else Home.REFUSED",
        "self.home[peer] = Home.COUNTS",
        ("ranks/test_events.py::test_a_late_rank_is_dropped_and_the_mask_replays_to_the_bit",),
    ),
    Fault(
        "a-home-that-says-nothing",
        "overlap/events/ledger.py",
        "a home does without a reply, and its host waits for the gradient",
        """                self.home[peer] = Home.GIVEN_UP
                messages.append((peer, Kind.DROPPED))
""",
        "                self.home[peer] = Home.GIVEN_UP\n",
        ("unit/test_liveness.py::test_ours_has_none_in_any_interleaving",),
    ),
    Fault(
        "a-piece-of-an-expert-that-counts-alone",
        "overlap/events/ledger.py",
        "a home does without one tensor rank of an expert, and uses what another made of it",
        "if all(self.home[r] is Home.COUNTS for r in ranks):",
        "if any(self.home[r] is Home.COUNTS for r in ranks):",
        ("unit/test_liveness.py::test_four_ranks_that_share_experts",),
    ),
    Fault(
        "letters-that-came-early-are-lost",
        "overlap/events/seat.py",
        "what came for a call before it began is forgotten",
        "record.letters += self.early.pop(self.calls, [])",
        "self.early.pop(self.calls, [])",
        ("ranks/test_events.py::test_what_comes_before_its_call_is_kept_for_it",),
    ),
    Fault(
        "events-count-from-the-last-given-up",
        "overlap/events/seat.py",
        "ranks that gave up in different calls never have patience in the same one again",
        "before // self.every == call // self.every:",
        "call - before < self.every:",
        ("unit/test_events.py::test_one_call_of_so_many_is_given_up_by_all_ranks_alike",),
    ),
    Fault(
        "model-dies-only-before-it-has-chosen",
        "reproduce/one_order.py",
        "four ranks' deaths between two messages are not gone through",
        "yield from (self._dead(s, rank) for s in following if s[0][rank][0] == FORWARD)",
        "pass",
        ("unit/test_liveness.py::test_one_order_loses_no_end_where_one_dies",),
    ),
]

SIMULATE = [
    Fault(
        "rows-arrive-with-the-first-sender",
        "simulate/engine.py",
        "a collective move is over when the first rank has sent",
        "there_W = np.full_like(sent_W, sent_W.max())",
        "there_W = np.full_like(sent_W, sent_W.min())",
        ("unit/test_simulate_engine.py::test_the_faster_rank_waits_for_rows",),
    ),
    Fault(
        "moves-of-a-rank-meet",
        "simulate/engine.py",
        "a move begins before the one before it has arrived",
        "allowed = self.arrived_MW[number - 1] if wait and number else np.zeros_like(self.clock)",
        "allowed = np.zeros_like(self.clock)",
        ("unit/test_simulate_engine.py::test_unequal_ranks_are_as_in_a_queue_of_events",),
    ),
    Fault(
        "oversubscription-ignored",
        "simulate/fabric.py",
        "a tier with too few links above it is as fast as any",
        'bytes_s=rate / float(line.get("oversubscription", 1)),',
        "bytes_s=rate,",
        ("unit/test_simulate_plans.py::test_a_shared_port_and_an_oversubscribed_tier_are_slower",),
    ),
    Fault(
        "plans-that-do-not-fit",
        "simulate/plans.py",
        "a layout is offered that needs more memory than a rank has",
        "    if memory > room:\n",
        "    if memory > 100 * room:\n",
        ("unit/test_simulate_plans.py::test_what_does_not_fit_is_refused_by_its_bytes",),
    ),
]
