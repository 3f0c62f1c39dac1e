"""The faults that `make faults` puts back: twelve that once survived every test, and others of every room.

Two kinds are better left out: what no input can tell from the right code, and what stops every import.
"""

from __future__ import annotations

from tests.faults.balancer import BALANCER
from tests.faults.doors import DOORS
from tests.faults.fault import Fault
from tests.faults.launches import LAUNCHES
from tests.faults.overlap import EVENTS, FUSED, SCHEDULES, TUNING
from tests.faults.protocol import ONCE_SURVIVED_HERE, PROTOCOL
from tests.faults.serving import SERVING
from tests.faults.simulate import SIMULATE

ONCE_SURVIVED = [
    Fault(
        "words-of-all-threads",
        "kernels/jit.py",
        "threads fill in the arguments of one another's launches",
        "self._copies.get(threading.get_ident()) or",
        "next(iter(self._copies.values()), None) or",
        ("unit/test_launches.py::test_threads_do_not_fill_in_each_others_words",),
    ),
    Fault(
        "fp8-by-own-word",
        "exchange/nvlink_fit.py",
        "a rank sends few rows as they are although another rank's experts take no fp8",
        "        common &= word\n",
        "        common &= word | 2\n",
        ("ranks/test_fp8_rows.py::test_a_rank_whose_experts_take_no_fp8",),
    ),
    Fault(
        "own-sum-first",
        "exchange/rows.py",
        "the own partial sum is added first, not in its rank's place",
        """    out = torch.zeros_like(own_TD, dtype=torch.float32)
    begin = 0
    for source, size in enumerate(sizes):
        if source == rank:
            out += own_TD
        elif size:""",
        """    out = own_TD.float().clone()
    begin = 0
    for source, size in enumerate(sizes):
        if source != rank and size:""",
        ("unit/test_plan.py::test_the_own_partial_sum_is_added_in_its_place",),
    ),
    Fault(
        "gradients-with-rows-dropped",
        "overlap/chunks.py",
        "of a weight with a deferred gradient, what came with the rows is dropped",
        "else grad if left is None else left + grad for left, grad in both]",
        "else grad if left is None else left for left, grad in both]",
        ("ranks/test_pipelined.py::test_gradients_that_come_with_rows_and_later_are_added",),
    ),
    Fault(
        "allreduce-rounds-own-sums",
        "transport/allreduce.py",
        "an encoded sum over ranks rounds the own partial sums too",
        "sums += partial_TD[begin : begin + mine] if rank == self.rank else decode(part).float()",
        "sums += decode(part).float()",
        ("ranks/test_wire.py::test_own_sums_are_not_rounded_where_they_are_added",),
    ),
    Fault(
        "planning-left-out",
        "schedule/profile.py",
        "the time to plan is no part of a forward's makespan",
        "+ (0.0 if backward else self.planning(order.degree))",
        "+ 0.0",
        ("unit/test_schedule_orders.py::test_planning_comes_before_the_forward_alone",),
    ),
    Fault(
        "call-number-not-compared",
        "exchange/agreement.py",
        "ranks may be in different calls of an exchange",
        '    3: "the number of calls so far",\n',
        "",
        ("unit/test_agreement.py",),
    ),
    Fault(
        "board-waits-sixty-times-too-long",
        "transport/board.py",
        "hosts wait for minutes where seconds were asked for",
        "if now > deadline.until and",
        "if now > deadline.until + 59 * self.timeout_s and",
        ("unit/test_board.py::test_a_rank_that_does_not_come_is_named",),
    ),
    Fault(
        "prune-keeps-complete",
        "parallel/checkpoint_files.py",
        "a pruned checkpoint keeps its mark, and so looks whole",
        "        path.rename(gone)\n    shutil.rmtree(gone)\n",
        "        for file in path.iterdir():\n            file.unlink() if file.name != MARK else None\n",
        ("unit/test_checkpoint.py::test_keeps_the_newest",),
    ),
    Fault(
        "relocate-on-one-rank",
        "exchange/exchange.py",
        "the first rank alone hears that experts have moved",
        "        self.geometry = replace(self.geometry, placement=new",
        "        if self.geometry.rank:\n            return\n"
        "        self.geometry = replace(self.geometry, placement=new",
        ("ranks/test_layer_nvlink.py::test_experts_move_between_calls",),
    ),
]

EXCHANGE = [
    Fault(
        "placement-not-compared",
        "exchange/agreement.py",
        "a rank that has not relocated is not noticed",
        '    4: "the placement (its checksum; every rank must relocate between the same two calls)",\n',
        "",
        ("ranks/test_bad_input.py::test_a_placement_that_only_one_rank_has_is_refused",),
    ),
    Fault(
        "placement-not-in-the-note",
        "exchange/nvlink_meeting.py",
        "a rank that has not relocated is not noticed over NVLink",
        "self.layer, self.where, how",
        "self.layer, how",
        ("ranks/test_bad_input.py::test_a_placement_that_only_one_rank_has_is_refused_over_nvlink",),
    ),
    Fault(
        "a-check-as-a-dispatch",
        "exchange/nvlink_meeting.py",
        "a rank that is compiled dispatches where its peers only check their input",
        "how = checks << 2 | ",
        "how = ",
        ("ranks/test_compiled_beside_eager.py::test_a_first_call_that_one_rank_compiles_is_refused",),
    ),
    Fault(
        "one-id-too-many",
        "exchange/agreement.py",
        "the id E is taken for an expert",
        "(ids_TK < -1) | (ids_TK >= num_experts)",
        "(ids_TK < -1) | (ids_TK > num_experts)",
        ("unit/test_agreement.py::test_ids_at_the_edge",),
    ),
    Fault(
        "padding-rounds-up-whole-slots",
        "exchange/plan.py",
        "a slot whose rows fill its alignment gets another block",
        "(total_S + alignment - 1) // alignment * alignment",
        "(total_S + alignment) // alignment * alignment",
        ("unit/test_plan.py::test_alignment_and_capacity_pad_every_slot",),
    ),
    Fault(
        "lower-ranks-not-counted",
        "exchange/plan.py",
        "rows of two ranks have one place",
        "starts_S - starts_S[first_slot] + split_WS[:rank].sum(0)",
        "starts_S - starts_S[first_slot] + split_WS[:0].sum(0)",
        ("unit/test_plan.py::test_the_example_of_the_module",),
    ),
    Fault(
        "rows-summed-in-the-order-of-choices",
        "exchange/rows.py",
        "a token's rows are not summed in ascending row order",
        "    ordered, _ = torch.where(position_PK < 0, num_rows, position_PK).sort(1)\n",
        "    ordered, most = torch.where(position_PK < 0, num_rows, position_PK), position_PK.shape[1]\n",
        ("unit/test_plan.py::test_rows_are_summed_in_ascending_order",),
    ),
    Fault(
        "padding-has-a-weight-gradient",
        "exchange/bytes.py",
        "what stands in padding rows becomes the gradient of a weight",
        "d_weights_R = torch.where(source_R < 0, 0.0, (rows_RD.float() * d_y_RD.float()).sum(1))",
        "d_weights_R = (rows_RD.float() * d_y_RD.float()).sum(1)",
        ("unit/test_plan.py::test_padding_rows_have_no_weight_gradient",),
    ),
    Fault(
        "sent-weights-gradients-lost",
        "exchange/bytes.py",
        "gradients of the weights of tokens that were sent do not come home",
        "d_weights_TK = self._add_home(own_TK, sent_back, traffic)",
        "d_weights_TK = own_TK.float()",
        ("ranks/test_layer.py::test_outputs_and_all_gradients",),
    ),
    Fault(
        "a-handle-of-another-exchange",
        "exchange/exchange.py",
        "combine takes any exchange's handle",
        "if maker.key != handle.maker:",
        "if maker is None:",
        ("ranks/test_bad_input.py::test_rows_that_cannot_be_combined",),
    ),
    Fault(
        "one-page-of-words",
        "transport/board.py",
        "the words of two calls stand in one place",
        "at = self.calls % 2 * 2 * ranks",
        "at = 0",
        ("unit/test_board.py",),
    ),
    Fault(
        "addend-of-another-dtype",
        "exchange/exchange.py",
        "kernels read an addend in float32 as bfloat16",
        "if addend.dtype not in maker.dtypes:",
        "if False:",
        ("ranks/test_bad_input.py::test_rows_that_cannot_be_combined_over_nvlink",),
    ),
    Fault(
        "few-bytes-by-own-rows",
        "transport/alltoall.py",
        "a rank takes gloo's own call by what it sends itself, where others may post messages",
        "hops=(sizes.max().view(1),)",
        "hops=(sizes[self.rank].max().view(1),)",
        ("ranks/test_transport_suite.py::test_few_bytes_go_by_gloos_own_call_on_all_ranks_or_on_none",),
    ),
]

CODECS = [
    Fault(
        "int8-truncates",
        "codec/int8.py",
        "bytes are rounded towards zero",
        ".round_().clamp_(-127, 127)",
        ".trunc_().clamp_(-127, 127)",
        ("unit/test_codec_casts.py::test_int8_by_hand",),
    ),
    Fault(
        "fp16-overflows",
        "codec/cast.py",
        "what is too large becomes an infinity",
        "    return values.clamp(-largest, largest).to(dtype)",
        "    return values.to(dtype)",
        ("unit/test_codec_casts.py::test_fp16_saturates",),
    ),
    Fault(
        "int4-scale-rounds-down",
        "codec/int4.py",
        "seven steps do not reach the largest value",
        "((bits + 0xFFFF) >> 16)",
        "(bits >> 16)",
        ("unit/test_codec_casts.py::test_int4_scales_are_rounded_up",),
    ),
    Fault(
        "nvfp4-ties-go-down",
        "codec/nvfp4.py",
        "a tie goes to the odd code",
        "LIMITS = (0.25, _below[0], 1.25, _below[1], 2.5, _below[2], 5.0)",
        "LIMITS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)",
        ("unit/test_codec_suite.py::test_nvfp4_values_by_hand",),
    ),
    Fault(
        "fp8-one-scale-a-row",
        "codec/fp8.py",
        "blocks of 128 values share the first one's scale",
        "blocks.join(blocks.cut(values, BLOCK) * scale[:, :, None], width)",
        "blocks.join(blocks.cut(values, BLOCK) * scale[:, :1, None], width)",
        ("unit/test_codec_suite.py::test_contract",),
    ),
    Fault(
        "kernel-int4-rounds-to-even-scale",
        "kernels/codec/formats.cuh",
        "the kernel's int4 scale is not rounded up",
        "(__float_as_uint(scale_of(amax, 7.0f)) + 0xffff) >> 16",
        "__float_as_uint(scale_of(amax, 7.0f)) >> 16",
        ("unit/test_codec_kernels.py::test_kernels_keep_the_bytes",),
    ),
]

EXPERTS = [
    Fault(
        "k-tail-of-the-next-expert",
        "kernels/gemm/load.cuh",
        "a gradient of weights takes rows of the next expert",
        "const int v = least(C::kWgrad ? k_left : tile.rows, C::kWgrad ? C::kBlockK : C::kBlockM);",
        "const int v = C::kWgrad ? C::kBlockK : least(tile.rows, C::kBlockM);",
        ("unit/test_expert_kernels_emulated.py::test_gradient_of_weights",),
    ),
    Fault(
        "gradient-replaces-the-sum",
        "kernels/gemm/store.cuh",
        "a gradient is stored where it should be added",
        "ptx::tma_add_3d(map_d, panel, column, row, tile.expert);",
        "ptx::tma_store_3d(map_d, panel, column, row, tile.expert);",
        ("unit/test_expert_kernels_emulated.py::test_gradient_is_added",),
    ),
    Fault(
        "a-tile-over-its-edge",
        "kernels/gemm/store.cuh",
        "the last rows of a tile are stored a row too far",
        "ptx::tma_store_3d(map_d, panel, column, 64 - rows, row + rows);",
        "ptx::tma_store_3d(map_d, panel, column, 64 - rows, row + rows + (rows < 64));",
        ("unit/test_expert_kernels_emulated.py::test_forward_keeps_gate_and_up",),
    ),
    Fault(
        "behind-not-zero",
        "kernels/gemm/behind.cu",
        "counters of parts that are made are not zero again behind the second product",
        "        for (int i = 0; i <= kParts; ++i) progress[i] = 0;\n",
        "        progress[kParts] = 0;\n",
        ("unit/test_expert_kernels_emulated.py::test_a_product_behind_has_the_same_bits",),
    ),
    Fault(
        "behind-while-stored",
        "kernels/gemm/parts.cuh",
        "a tile is told while its stores are under way",
        "        note<kCommits>();\n",
        "        note<2 * kCommits>();\n",
        ("unit/test_product_behind.py",),
    ),
    Fault(
        "groups-of-tiles-overlap",
        "kernels/gemm/scheduler.cuh",
        "the last group of row tiles is taken for a whole one",
        "const int side = left < kGroupM ? left : kGroupM;",
        "const int side = kGroupM;",
        ("compile/test_gemm_scheduler.py",),
    ),
    Fault(
        "a-group-too-short",
        "experts/products.py",
        "an expert's last row is left out of its weights' gradient",
        "torch.mm(rows_RK[piece].T, d_out_RN[piece], out=out[group])",
        "torch.mm(rows_RK[piece][:-1].T, d_out_RN[piece][:-1], out=out[group])",
        ("unit/test_experts_suite.py::test_contract",),
    ),
]

ROUTER = [
    Fault(
        "nan-dropped-by-its-sign",
        "router/capacity.py",
        "capacity drops a choice whose weight is NaN with its sign set, and the token comes out finite",
        "weights_TK.detach().abs().contiguous()",
        "weights_TK.detach().contiguous()",
        ("unit/test_router.py::test_a_weight_that_is_nan_is_not_dropped_unseen",),
    ),
    Fault(
        "ties-go-anywhere",
        "router/gates.py",
        "of equal scores any expert is chosen",
        "scores_TE.sort(dim=-1, descending=True, stable=True).indices[:, :k]",
        "scores_TE.flip(-1).topk(k).indices.neg() + scores_TE.shape[1] - 1",
        ("unit/test_router.py::test_equal_scores_choose_the_lowest_expert",),
    ),
    Fault(
        "groups-by-their-best",
        "router/gates.py",
        "a group is worth its best expert, not its two best",
        '.topk(1 if groups.by == "max" else 2, dim=-1)',
        ".topk(1, dim=-1)",
        ("unit/test_router_transformers.py::test_equals_transformers",),
    ),
    Fault(
        "bias-in-the-weights",
        "router/gates.py",
        "the bias for the selection gets into the weights",
        "weights_TK = scores_TE.gather(1, ids_TK)",
        "weights_TK = wanted_TE.gather(1, ids_TK)",
        ("unit/test_router.py::test_bias_update_balances_without_touching_weights",),
    ),
    Fault(
        "kernel-weights-not-renormalised",
        "kernels/gate/choose.cu",
        "the kernel's weights are the scores",
        "(gate.normalize ? my_score / (sum + kTiny) : my_score) * gate.scale",
        "my_score * gate.scale",
        ("unit/test_gate_emulated.py::test_as_the_operators",),
    ),
    Fault(
        "kernel-ties-go-to-the-highest",
        "kernels/gate/choose.cu",
        "of equal scores a lane takes its last expert",
        "if (key[i] > best) best = key[i]",
        "if (key[i] >= best) best = key[i]",
        ("unit/test_gate_emulated.py",),
    ),
    Fault(
        "losses-of-the-last-token",
        "kernels/gate/choose.cu",
        "a warp that has several tokens counts the last one's logsumexp",
        "square += logsum * logsum",
        "square = logsum * logsum",
        ("unit/test_gate_emulated.py::test_sums_to_the_bit",),
    ),
    Fault(
        "losses-of-every-32nd-chunk",
        "kernels/gate/losses.cu",
        "slices of a sequence that has not all warps leave chunks out",
        "c < chunks; c += slices",
        "c < chunks; c += kLossWarps",
        ("unit/test_gate_emulated.py::test_sums_to_the_bit",),
    ),
    Fault(
        "losses-gradient-of-one-rank",
        "kernels/gate/choose.cu",
        "the gradient of the sum over ranks is that of one rank's loss",
        "read_or_zero(d_balance) * ranks *",
        "read_or_zero(d_balance) *",
        ("unit/test_gate_emulated.py::test_terms_of_two_ranks_are_added",),
    ),
    Fault(
        "compiled-rank-alone-by-bytes",
        "exchange/alone.py",
        "a compiler is told of as many rows as the run says, though there is room for all",
        "room_for_all = True",
        "room_for_all = False",
        ("unit/test_alone_dispatcher.py::test_a_compiler_sees_sizes_that_it_knows",),
    ),
    Fault(
        "one-over-capacity",
        "router/capacity.py",
        "an expert takes one of the equal choices too many",
        "(ties_TK & (place_TK < limit))",
        "(ties_TK & (place_TK <= limit))",
        ("unit/test_router.py::test_laws",),
    ),
]

CHECKPOINTS = [
    Fault(
        "sizes-for-checksums",
        "parallel/checkpoint_files.py",
        "a file of the right length is taken for whole",
        "if (size, hexadecimal) != files[name]:",
        "if size != files[name][0]:",
        ("unit/test_checkpoint.py::test_damage_is_seen_and_the_older_one_read",),
    ),
    Fault(
        "prune-keeps-one-more",
        "parallel/checkpoint_files.py",
        "one checkpoint more than asked for stays",
        "[: paths.index(last) + 1][:-keep]",
        "[: paths.index(last) + 1][: -keep - 1]",
        ("unit/test_checkpoint.py::test_keeps_the_newest",),
    ),
    Fault(
        "steps-sort-as-text",
        "parallel/checkpoint_files.py",
        "step 100000000 comes before step 99999999",
        "[steps[step] for step in sorted(steps)]",
        "[steps[step] for step in sorted(steps, key=str)]",
        ("unit/test_checkpoint.py::test_only_a_number_makes_a_checkpoint_and_numbers_count",),
    ),
    Fault(
        "a-removal-that-looks-whole",
        "parallel/checkpoint_files.py",
        "a checkpoint keeps its name while it is removed",
        "        path.rename(gone)\n    shutil.rmtree(gone)\n",
        "        gone = path\n    shutil.rmtree(gone)\n",
        ("unit/test_checkpoint.py::test_a_removal_that_is_cut_off_leaves_nothing_that_looks_complete",),
    ),
    Fault(
        "resume-a-step-early",
        "demo/rank.py",
        "a run that resumes repeats its last step",
        "    return loaded or 0, Saving(",
        "    return max((loaded or 0) - 1, 0), Saving(",
        ("ranks/test_demo.py::test_resuming_with_other_ranks_goes_on_along_the_same_curve",),
    ),
]

GRADIENTS = [
    Fault(
        "compilers-are-asked-for-nan",
        "runtime/gradients.py",
        "a compiled layer of one rank asks autograd what no compiler traces: no graph, or one that breaks",
        "    if torch.compiler.is_compiling():  # which cannot trace what is asked below",
        "    if False:",
        ("unit/test_alone_dispatcher.py::test_a_layer_that_nobody_differentiates_is_one_operator[True-5]",),
    ),
    Fault(
        "other-parameters-summed",
        "parallel/buckets.py",
        "ranks sum gradients of other parameters than each other, or wait for each other",
        "    if (count, checksum) != (-fewest, -least):",
        "    if count < 0:",
        ("ranks/test_parallel.py::test_ranks_that_train_other_parameters_are_told",),
    ),
    Fault(
        "replays-wait-for-ever",
        "runtime/deadlines.py",
        "a captured wait over NCCL is looked at by nobody",
        "            self._replayed.append(Replayed(tallies, index, Wait(0, group, seconds, error)))\n",
        "            pass\n",
        ("unit/test_deadlines.py::test_a_replay_that_does_not_end_is_aborted_and_named",),
    ),
    Fault(
        "spare-labels-read",
        "kernels/rows/labels.cu",
        "choices of rows that nobody sent are read from what the memory held",
        "labels.source[i / labels.choices] < 0",
        "false",
        ("unit/test_compact_rows.py::test_labels_come_as_they_left",),
    ),
    Fault(
        "experts-not-averaged",
        "parallel/buckets.py",
        "experts' gradients are those of the sum of losses",
        "        left = num_token_ranks(layer) / layer.mean_over\n",
        "        left = 1.0\n",
        ("ranks/test_parallel.py::test_replicas_sum_theirs",),
    ),
    Fault(
        "replicas-do-not-sum",
        "parallel/buckets.py",
        "a replica keeps the gradient of its own tokens",
        "        if layer.placement.has_replicas:\n            yield from _of_replicas(gradient, layer)\n",
        "",
        ("ranks/test_parallel.py::test_replicas_sum_theirs",),
    ),
    Fault(
        "replicas-counted-twice",
        "parallel/clipping.py",
        "the norm counts an expert as often as it has replicas",
        "if e >= 0 and placement.slots.index(e) == first + s]",
        "if e >= 0]",
        ("ranks/test_clipping.py::test_the_norm_is_that_of_one_process",),
    ),
]


FAULTS: list[Fault] = [
    *ONCE_SURVIVED,
    *ONCE_SURVIVED_HERE,
    *PROTOCOL,
    *EXCHANGE,
    *CODECS,
    *EXPERTS,
    *ROUTER,
    *SCHEDULES,
    *FUSED,
    *TUNING,
    *EVENTS,
    *SIMULATE,
    *BALANCER,
    *CHECKPOINTS,
    *GRADIENTS,
    *DOORS,
    *LAUNCHES,
    *SERVING,
]
