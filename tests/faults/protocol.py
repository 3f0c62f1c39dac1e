"""Faults of the flags and credits of the exchange's kernels: four that once survived every test, and more."""

from __future__ import annotations

from tests.faults.fault import Fault

OUT_OF_STEP = "unit/test_exchange_out_of_step.py"
OVERLAP = "unit/test_launches_that_overlap.py"

ONCE_SURVIVED_HERE = [
    Fault(
        "staged-flag-before-all-warps",
        "kernels/exchange/pull.cuh",
        "a group of tokens is said to be staged by the first warp that is done",
        "        ptx::named_barrier(kStagersBarrier, 32 * kStagers);\n",
        "",
        (f"{OUT_OF_STEP}::test_pulled_rows_are_those_of_their_call",),
    ),
    Fault(
        "reduced-flag-before-other-lanes",
        "kernels/exchange/reduce.cuh",
        "sums are said to be there before the other lanes have stored theirs",
        """    __syncwarp();
    if (ptx::lane_id() == 0) {
        ptx::fence_sys();
        ptx::store_relaxed_sys(flag_of(*call.group, call.group->reduced_flags,""",
        """    if (ptx::lane_id() == 0) {
        ptx::fence_sys();
        ptx::store_relaxed_sys(flag_of(*call.group, call.group->reduced_flags,""",
        (f"{OUT_OF_STEP}::test_sums_of_whole_rows_are_those_of_their_call",),
    ),
    Fault(
        "gather-one-call-early",
        "kernels/exchange/gather.cu",
        "sums are pulled from peers that are still in the call before",
        "if (!wait_credit(call, lane, 1)) return false;",
        "if (!wait_credit(call, lane, 2)) return false;",
        (f"{OUT_OF_STEP}::test_gathered_sums_are_those_of_their_call",),
    ),
    Fault(
        "credit-after-a-captured-call",
        "kernels/exchange/launcher.py",
        "a replay writes rows that the call before it still uses",
        "1 if self._captured else buffers",
        "buffers",
        (f"{OUT_OF_STEP}::test_a_captured_push_waits_for_who_uses_its_buffer",),
    ),
]

PROTOCOL = [
    Fault(
        "backwards-in-any-order",
        "exchange/bytes.py",
        "ranks may go back through layers in another order, which mixes gradients",
        "        self.backwards.note(self.number)\n",
        "",
        ("ranks/test_bad_input.py::test_backwards_in_another_order",),
    ),
    Fault(
        "sums-of-a-failed-call-beside-down",
        "kernels/fused/down_home.cu",
        "what a failed call has not summed is what the memory held",
        "if (!summers.run<Many>()) spoil(call, reduce);",
        "summers.run<Many>();",
        ("unit/test_down_home.py::test_replays_behind_a_failed_call_have_no_sums",),
    ),
    Fault(
        "a-flag-of-two-billion-calls-before",
        "kernels/peers/protocol.cuh",
        "words that only large calls write are taken for later ones after 2^31 calls",
        "{ return value - epoch < kSoon; }",
        "{ return static_cast<int>(value - epoch) >= 0; }",
        ("unit/test_exchange_failed.py::test_a_flag_that_nobody_wrote_for_two_billion_calls_says_nothing",),
    ),
    Fault(
        "rows-asked-for-before-the-product-ends",
        "kernels/exchange/reduce.cuh",
        "sums of a small batch read rows that the last product is still writing",
        "        ptx::wait_for_launches();  // until here nobody has asked for rows, nor stored anything\n",
        "",
        (f"{OVERLAP}::test_sums_ask_for_rows_when_these_are_there",),
    ),
    Fault(
        "rows-of-a-rank-alone-asked-for-before-the-product-ends",
        "kernels/ffn/glue.cu",
        "sums of a rank alone read rows that the last product is still writing",
        "    ptx::wait_for_launches();\n    ptx::launch_dependents();\n    if (count",
        "    ptx::launch_dependents();\n    if (count",
        (f"{OVERLAP}::test_sums_of_a_rank_alone_ask_for_rows_when_these_are_there",),
    ),
    Fault(
        "weights-spread-before-routing-ends",
        "kernels/rows/weights.cu",
        "counts are copied that the dispatch before may still be writing",
        """    ptx::wait_for_launches();
    ptx::launch_dependents();  // the product behind waits for this launch before it reads
    for (int i = first(); i < w.slots; i += stride()) w.counts_e[i] = w.counts[i];
""",
        """    ptx::launch_dependents();
    for (int i = first(); i < w.slots; i += stride()) w.counts_e[i] = w.counts[i];
    ptx::wait_for_launches();
""",
        (f"{OVERLAP}::test_weights_are_spread_when_routing_has_ended",),
    ),
    Fault(
        "who-has-rows-of-the-call-before",
        "kernels/exchange/small.cuh",
        "the experts of a small batch may take the list of a call before for that of this one",
        "    if (thread == 32) ffn::tell_no_hits(hits_of(call, small));\n",
        "",
        (f"{OVERLAP}::test_who_has_rows_and_the_last_end_are_told_when_all_else_is_known",),
    ),
    Fault(
        "products-do-not-wait-for-who-has-rows",
        "kernels/ffn/hits.cuh",
        "the products of a small batch take the list of a dispatch that has not told it",
        "        if (count >= 0) return count;\n",
        "        return count < 0 ? 0 : count;\n",
        ("unit/test_one_launch.py::test_it_begins_before_it_is_known_who_has_rows",),
    ),
    Fault(
        "who-asks-for-columns-sets-counters-back",
        "kernels/ffn/both.cuh",
        "a block whose weights are all asked for leaves a launch in fp8, whose warps still wait for rows",
        "    if (!Up::kQuantises) leave(both, team.all());\n",
        "    leave(both, team.all());\n",
        ("unit/test_one_launch_fp8.py::test_the_bits_of_three_launches",),
    ),
    Fault(
        "rows-of-the-same-launch-are-not-waited-for",
        "kernels/fused/few.cu",
        "the experts of one launch with their dispatch ask for rows before they are placed",
        "[=](u32 placed) { return placed >= due; }",
        "[=](u32) { return true; }",
        ("unit/test_few_in_one.py::test_rows_may_come_late",),
    ),
    Fault(
        "a-list-of-the-call-before-in-the-same-launch",
        "kernels/fused/few.cu",
        "the experts of one launch with their dispatch take an old list of who has rows for this call's",
        "[](u32 word) { return (word & exchange::kHitsTold) != 0; });",
        "[](u32) { return true; }) && static_cast<int>(both.hits[0]) >= 0;",
        ("unit/test_few_in_one.py::test_a_list_of_the_call_before_is_not_taken",),
    ),
    Fault(
        "a-ticket-before-the-last-store-where-rows-are-not-whole",
        "kernels/fused/few.cu",
        "one launch of a dispatch and its experts leaves rows of a call in which a rank never came",
        "    if (ptx::load_acquire_gpu(exchange::told_of(call)) >= kNotWhole) return;\n",
        "",
        ("unit/test_few_in_one.py::test_a_rank_that_never_comes_leaves_no_rows",),
    ),
    Fault(
        "a-first-record-without-a-meeting",
        "exchange/recorded.py",
        "a rank that makes its record does not meet one that makes steps and promises nothing",
        """                self._agree_on_rows(dispatcher)
                home = {""",
        """                home = {""",
        ("ranks/test_recorded.py::test_ranks_may_differ_and_hear_of_each_other",),
    ),
    Fault(
        "one-kernel-by-the-tokens-of-this-rank",
        "exchange/recorded.py",
        "a rank of few tokens takes the one kernel where another has many, where it is slower",
        "why_apart(dispatcher, part.max_tokens, *what)",
        "why_apart(dispatcher, x_TD.shape[0], *what)",
        ("ranks/test_recorded.py::test_one_and_two_tokens_take_one_kernel_by_default",),
    ),
    Fault(
        "captured-calls-of-many-tokens-by-the-recorder",
        "exchange/recorded.py",
        "captured calls of many tokens turn to their steps behind a meeting, and not before",
        "        if in_graph and why_apart(dispatcher, x_TD.shape[0], *what) is not None:\n",
        "        if in_graph and not x_TD.shape[0]:\n",
        ("ranks/test_recorded.py::test_one_and_two_tokens_take_one_kernel_by_default",),
    ),
    Fault(
        "sums-look-up-rows-before-routing-is-written",
        "kernels/exchange/told.cuh",
        "sums behind one launch of a dispatch and its experts ask where tokens go before it is written",
        "told == (kHitsTold | kRowsTold)",
        "told != 0",
        (f"{OVERLAP}::test_sums_behind_a_launch_that_dispatches_wait_until_routing_is_written",),
    ),
    Fault(
        "scales-of-rows-in-another-stage",
        "kernels/ffn/quantised.cuh",
        "scales of rows in fp8 go to another stage than their rows",
        "shared.row_scales[ring.stage * C::kBlockM + row] = found.scale",
        "shared.row_scales[row] = found.scale",
        ("unit/test_one_launch_fp8.py::test_the_bits_of_three_launches",),
    ),
    Fault(
        "ends-of-the-call-before",
        "kernels/exchange/small.cuh",
        "the first product takes where rows ended in the call before for where they end",
        "    if (thread == 0) tell_last_end(call, small, -1);\n",
        "",
        (f"{OVERLAP}::test_who_has_rows_and_the_last_end_are_told_when_all_else_is_known",),
    ),
    Fault(
        "last-end-before-the-others",
        "kernels/exchange/small.cuh",
        "the first product reads where rows end before all of it is written",
        "if (slot < small.slots - 1) ends[slot] = before + end;",
        "tell_last_end(call, small, 0); if (slot < small.slots - 1) ends[slot] = before + end;",
        (f"{OVERLAP}::test_who_has_rows_and_the_last_end_are_told_when_all_else_is_known",),
    ),
    Fault(
        name="rows-of-a-failed-call-are-kept",
        file="kernels/peers/protocol.cuh",
        what="rows that have not come are what the memory held",
        old="    if (__syncthreads_and(kept)) return;\n",
        new="    if (__syncthreads_and(kept) || call.epoch) return;\n",
        tests=("unit/test_exchange_failed.py",),
    ),
    Fault(
        name="a-wait-of-a-stream-without-an-end",
        file="runtime/deadlines.py",
        what="a collective over NCCL that does not come is waited for till torch ends the process",
        old="return front, now - self._since",
        new="return None",
        tests=("unit/test_deadlines.py::test_a_wait_that_does_not_end_is_aborted_and_named",),
    ),
    Fault(
        "push-without-credit",
        "kernels/exchange/push.cuh",
        "rows are pushed into a buffer that is used again at once",
        "fine = fine && wait_credit(call, lane, push.lag);",
        "fine = fine && wait_credit(call, lane, 2);",
        (f"{OUT_OF_STEP}::test_a_captured_push_waits_for_who_uses_its_buffer",),
    ),
    Fault(
        "arrived-before-the-rows",
        "kernels/exchange/mover.cuh",
        "rows are said to be there while the copy engine still stores them",
        """        ptx::mbarrier_arrive(ring.segment_empty + 8 * buffer);
    }
    ptx::bulk_wait<0>();
""",
        """        ptx::mbarrier_arrive(ring.segment_empty + 8 * buffer);
    }
    ptx::bulk_wait_read<0>();
""",
        (f"{OUT_OF_STEP}::test_pushed_rows_last_until_the_next_push",),
    ),
    Fault(
        "staged-without-credit",
        "kernels/exchange/pull.cuh",
        "tokens are staged a call before their buffer is free",
        "if (!wait_credit(call, thread % 32, pull.lag)) return;",
        "if (!wait_credit(call, thread % 32, pull.lag + 1)) return;",
        (f"{OUT_OF_STEP}::test_pulled_rows_are_those_of_their_call",),
    ),
    Fault(
        "sums-without-credit",
        "kernels/exchange/reduce.cu",
        "sums are written a call before their buffer is free",
        "fine = wait_credit(call, lane, 2);",
        "fine = wait_credit(call, lane, 3);",
        (f"{OUT_OF_STEP}::test_sums_are_not_written_where_those_of_two_calls_before_may_be_read",),
    ),
    Fault(
        "own-sum-first-in-the-kernel",
        "kernels/exchange/reduce.cuh",
        "own rows are added before the sums of lower ranks",
        """    int count = append(terms, 0, sent && lane < call.me, partial, 1.0f, WIRE_FP8);
    count = append_rows(call, reduce, terms, count, choice);
    count = append(terms, count, sent && lane > call.me, partial, 1.0f, WIRE_FP8);
""",
        """    int count = append_rows(call, reduce, terms, 0, choice);
    count = append(terms, count, sent, partial, 1.0f, WIRE_FP8);
""",
        ("unit/test_exchange_combine.py::test_whole_rows_are_one_stream",),
    ),
    Fault(
        "many-rows-by-all-words",
        "exchange/nvlink_fit.py",
        "rows are counted first only where every rank counts enough layers, some of which may be garbage",
        "bool(some & 4)",
        "bool(common & 4)",
        (
            "ranks/test_layer_nvlink.py::test_rows_of_many_layers_are_exactly_many_where_all_together_spare_memory",
        ),
    ),
    Fault(
        "a-record-of-room-for-all",
        "exchange/recorded.py",
        "a call whose rows are to be counted first is launched from a record with room for all",
        "kernels.serial, *part[1:], keep",
        "kernels.serial, *part[1:4], keep",
        ("ranks/test_recorded.py::test_a_record_is_not_launched_where_rows_are_counted_from_now_on",),
    ),
    Fault(
        "a-backward-by-the-last-gradients",
        "exchange/recorded_back.py",
        "a backward from a record writes where the weights' gradients of another step were",
        'kernels.next_buffer("pull", peek=True), *at\n        record, results',
        'kernels.next_buffer("pull", peek=True), *at[:4]\n        record, results',
        ("ranks/test_recorded.py::test_gradients_have_the_bits_of_those_of_the_steps",),
    ),
    Fault(
        "a-backward-twice-over-what-it-wrote",
        "exchange/recorded.py",
        "a second backward takes gradients of gate and up for gate and up",
        "            if results is not None:\n                ctx.consumed = True\n",
        "            if results is not None:\n",
        ("ranks/test_recorded.py::test_gradients_have_the_bits_of_those_of_the_steps",),
    ),
]
