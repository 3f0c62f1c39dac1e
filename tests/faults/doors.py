"""Faults of the doors to other libraries, of ranks and of what crosses between them."""

from __future__ import annotations

from tests.faults.fault import Fault

DOORS = [
    Fault(
        "chunks-do-not-know-transformers-weights",
        "adapters/transformers.py",
        "schedules of several chunks give updates of transformers' experts, as LoRA's, no gradients",
        '        for name in (*plain, *getattr(module, "parametrizations", ())):',
        "        for name in plain:",
        ("unit/test_transformers.py::test_experts_have_their_gradients_by_schedules_of_several_chunks",),
    ),
    Fault(
        "chunks-do-not-know-megatrons-weights",
        "adapters/megatron.py",
        "schedules of several chunks give Megatron's experts no gradients",
        "self.experts, self.parameters = experts, experts.parameters",
        "self.experts = experts",
        ("unit/test_megatron.py::test_numbers_and_gradients_are_those_of_dense_experts",),
    ),
    Fault(
        "blocks-kept-until-all-are-replaced",
        "adapters/huggingface/blocks.py",
        "a model whose blocks are replaced needs its own memory and all shares beside it",
        "    paths = [path for path, _ in moe_blocks(model)]",
        "    blocks = moe_blocks(model)\n    paths = [path for path, _ in blocks]",
        ("unit/test_huggingface.py::test_a_block_is_let_go_of_before_the_next_is_replaced",),
    ),
    Fault(
        "a-sharded-gate-saved-in-pieces",
        "adapters/huggingface/replaced.py",
        "of what FSDP2 shards in a replaced block, the first rank saves its piece",
        "return pieces.full_tensor().cpu() if is_sharded(value) else value",
        "return value",
        ("ranks/test_fsdp_models.py::test_losses_are_those_of_all_gather",),
    ),
    Fault(
        "ranks-of-a-bench-outlive-their-launcher",
        "launch/ranks.py",
        "ranks of tune, bench layer and bench serve go on when their launcher is killed",
        "    end_with_launcher()\n    rank = int",
        "    rank = int",
        ("ranks/test_bench_layer.py::test_ranks_end_with_their_launcher",),
    ),
    Fault(
        "messages-noted-by-two-threads",
        "transport/collective.py",
        "a lane begins a message while the caller goes through those under way",
        "        self._noting = Lock()\n",
        "        self._noting = __import__('contextlib').nullcontext()\n",
        ("ranks/test_transport_suite.py::test_a_lane_begins_messages_while_others_end",),
    ),
    Fault(
        "a-receive-let-go-of",
        "transport/collective.py",
        "a message that was begun and not waited for is forgotten, and gloo reads nothing more of its sender",
        "        self._under_way[work] = op, m.peer, m.tag\n",
        "",
        ("ranks/test_bad_input.py::test_what_one_rank_began_and_did_not_finish_stops_nobody",),
    ),
    Fault(
        "numbers-behind-a-loss",
        "transport/tiers.py",
        "work of a lane behind one that failed meets messages of other work, and gloo ends the process",
        "        if self.shared.lost:\n",
        "        if False:\n",
        ("ranks/test_tiered_hostile.py::test_nothing_is_numbered_behind_a_loss",),
    ),
    Fault(
        "threads-outlive-a-program",
        "runtime/waits.py",
        "a program whose layer holds its group is aborted at its end, on a busy machine",
        "@atexit.register\n",
        "",
        ("ranks/test_rank_lost.py::test_the_end_of_a_program_that_has_a_layer_looks_at_threads",),
    ),
    Fault(
        "deep-ep-own-rows-first",
        "adapters/deep_ep/bytes.py",
        "rows of the own rank stand before those of lower ranks",
        "torch.cat([crossed[: route.before], own, crossed[route.before :]])",
        "torch.cat([own, crossed])",
        ("ranks/test_deep_ep.py::test_every_call",),
    ),
    Fault(
        "deep-ep-overflow-unsaid",
        "adapters/deep_ep/permuted.py",
        "rows that do not fit are dropped without a word",
        "overflow=self.overflow | (self.counts_e.sum() > num_rows).int(),",
        "overflow=self.overflow,",
        ("unit/test_deep_ep.py::test_the_permutation_of_its_docstring",),
    ),
    Fault(
        "a-helping-step-stays",
        "serve/capture.py",
        "a captured step that is refused, or made for others, leaves its dummy in the sequence",
        "        if not full:\n            self.rewind()\n",
        "",
        ("ranks/test_capture.py::test_what_one_rank_refuses_stops_nobody",),
    ),
]
