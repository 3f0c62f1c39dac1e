"""Faults of serving: captured steps, what levers gain, and checkpoints that are loaded."""

from __future__ import annotations

from tests.faults.fault import Fault

LEVERS = "unit/test_serve_levers.py"
REPORT = "unit/test_serve_report.py"
LOADING = "ranks/test_load_memory.py::test_a_rank_reads_and_holds_its_share"

SERVING = [
    Fault(
        "refused-prompts-stop-the-others",
        "serve/capture.py",
        "where one rank refuses its prompts the others' starts wait for it",
        "        if input_ids is None or reason is not None:\n            self._help_start()\n",
        "        if input_ids is None:\n            self._help_start()\n",
        ("ranks/test_capture.py::test_what_one_rank_refuses_stops_nobody",),
    ),
    Fault(
        "refused-answers-stop-the-others",
        "serve/capture.py",
        "a rank that refuses its prompts ends before the others have agreed on their steps",
        "            size = None if reason else max_new_tokens\n",
        "            size = None if reason else max_new_tokens\n"
        '            if reason is not None:\n                raise ValueError(f"capture: {reason}")\n',
        ("ranks/test_capture.py::test_an_answer_that_one_rank_refuses_is_refused_alone",),
    ),
    Fault(
        "captured-for-inference-mode-alone",
        "serve/capture.py",
        "what a step writes to is an inference tensor, which nothing may write to later",
        "    with torch.inference_mode(False):\n",
        "    if graphs is not None:\n",
        ("unit/test_capture.py::test_a_capture_made_in_inference_mode_serves_outside_of_it",),
    ),
    Fault(
        "dropped-rows-go-on",
        "serve/engine.py",
        "requests that were dropped are decoded on the device to their end",
        "        self.steps.state.remaining_Z.zero_()\n",
        "",
        ("unit/test_serve.py::test_dropped_requests_leave_an_engine_as_new",),
    ),
    Fault(
        "a-window-before-all-are-served",
        "bench/serve/loop.py",
        "the first answers that end count while prompts of other users are not in yet",
        "if self._last is None and all(of_user[0].arrivals for of_user in self.answers):",
        "if self._last is None:",
        ("unit/test_serve_replay.py::test_two_answers_of_a_user_tell_what_ten_do",),
    ),
    Fault(
        "a-lever-that-stays-on",
        "bench/serve/levers.py",
        "without chunks a prompt still runs in chunks",
        "chunk=(rows, max(length, prompt))",
        "chunk=(rows, length)",
        (f"{LEVERS}::test_every_lever_is_off_by_itself",),
    ),
    Fault(
        "the-best-gain-of-all",
        "bench/serve/levers.py",
        "the gain of a lever is that of its luckiest pair of loops",
        '"median": statistics.median(ratios)',
        '"median": max(ratios)',
        (f"{LEVERS}::test_a_gain_is_of_loops_beside_each_other",),
    ),
    Fault(
        "waiting-is-work",
        "bench/serve/levers.py",
        "the host's own work counts what it waits for",
        "if name not in (*HostTime.OTHERS, *others)",
        "if name not in others",
        (f"{LEVERS}::test_a_line_sets_a_load_beside_itself_without_the_lever",),
    ),
    Fault(
        "levers-not-in-turns",
        "bench/serve/command.py",
        "all loops of a setting run one after the other, so that a slow minute is a lever's",
        "in list(kinds.items()) * (args.levers or 1):",
        "in (kind for kind in kinds.items() for _ in range(args.levers or 1)):",
        (f"{LEVERS}::test_loops_are_in_turns",),
    ),
    Fault(
        "graphs-of-processors",
        "bench/serve/command.py",
        "a processor, which has no graphs, is compared without them",
        'graphs = device.type == "cuda" and takes_graphs(model, way)',
        "graphs = takes_graphs(model, way)",
        ("ranks/test_serve.py::test_no_graph_is_a_lever_where_there_are_none",),
    ),
    Fault(
        "quantised-as-it-is",
        "serve/checkpoint.py",
        "weights in float8 are served without their scales",
        'if config.get("quantization_config") or config.get("compression_config"):',
        'if config.get("compression_config"):',
        ("unit/test_serve_checkpoint.py::test_what_is_not_served",),
    ),
    Fault(
        "prompts-as-they-become",
        "serve/engine.py",
        "a prompt that grows after it was looked at is written behind its slot",
        "            answer.request = replace(request, prompt=tuple(request.prompt))\n",
        "",
        ("unit/test_serve.py::test_a_prompt_that_changes_later_is_answered_as_it_was",),
    ),
    Fault(
        "two-models-at-once",
        "bench/serve/command.py",
        "the model of a way waits for Python's collector beside the next way's",
        "        gc.collect()  # the models of two ways may not fit a GPU\n",
        "",
        (f"{REPORT}::test_a_model_goes_before_that_of_the_next_way_comes",),
    ),
    Fault(
        "served-as-often-as-named",
        "bench/serve/command.py",
        "a number that is given twice is served twice, in rows that nothing tells apart",
        'return list(dict.fromkeys(map(int, text.split(","))))',
        'return list(map(int, text.split(",")))',
        (f"{REPORT}::test_what_is_named_twice_is_served_once",),
    ),
    Fault(
        "steps-are-no-time",
        "bench/serve/device.py",
        "the share in which no step ran is that in which one did",
        "round(1 - busy / whole, 4)",
        "round(busy / whole, 4)",
        ("unit/test_serve_replay.py::test_the_time_in_which_no_step_runs_is_told",),
    ),
    Fault(
        "latents-of-the-slot-with-the-row's-number",
        "serve/attention.py",
        "a chunk's rows see the used part of slots that are others'",
        "index_P = self.slots_B[row_P] * self.capacity + of_slot_P",
        "index_P = row_P * self.capacity + of_slot_P",
        ("unit/test_serve_latent.py::test_chunks_expanded_are_those_absorbed",),
    ),
    Fault(
        "loading-all-of-a-stack",
        "adapters/huggingface/weights.py",
        "a rank copies all experts of a layer to take its own",
        "tuple(weights.part(block.prefix + name, expert) for name in names)",
        "tuple(weights[block.prefix + name].clone()[expert] for name in names)",
        (f"{LOADING}[fused-ours]",),
    ),
    Fault(
        "loading-what-will-be-replaced",
        "adapters/huggingface/loading.py",
        "transformers reads the blocks of all experts, which are replaced then",
        "                self.set_submodule(path, nn.Module())\n",
        "                pass\n",
        (f"{LOADING}[one by one-ours]",),
    ),
]
