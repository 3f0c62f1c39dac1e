"""Serve a closed loop of users, transports side by side: tokens a second of a GPU and a user."""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from imbrex.bench.serve import levers
from imbrex.bench.serve.levers import LEVERS, NONE_ON, TURNS, gains, middle, without
from imbrex.bench.serve.loop import Load, serve
from imbrex.bench.serve.models import ALONE, DTYPES, GATHER, MODELS, RIVALS, Way, make_model, takes_graphs
from imbrex.bench.serve.training import LENGTH, train
from imbrex.launch.local import is_worker
from imbrex.launch.memory import check_memory
from imbrex.launch.ranks import join, run_on_ranks, settle, words_of
from imbrex.layer import MoELayer
from imbrex.observe import PhaseBoard
from imbrex.serve.checkpoint import served_config
from imbrex.serve.decoding import Drafting
from imbrex.serve.engine import Engine, HostTime, Settings
from imbrex.serve.model import Decoder

if TYPE_CHECKING:
    from rich.table import Table

QUESTION = "How many tokens a second does a GPU give, and a user see?"
SMALLER = "give fewer --users, shorter requests, a smaller --chunk or a smaller --model"
SWEPT = ("drafts", "interval", "input")
LISTS = ("users", *SWEPT)
"""Options that take several numbers; an engine for all users, and one for each of the swept ones."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="demo", choices=tuple(MODELS), help="whose widths (demo)")
    add("--weights", metavar="DIR", help="serve a checkpoint of Qwen3-MoE or Mixtral, not --model's widths")
    add("--ranks", type=int, metavar="W", help="local processes (one a GPU; 2 without)")
    ways = f"which to compare: auto, {', '.join(RIVALS)}, {ALONE}, or a transport (auto,{GATHER})"
    add("--transport", default=f"auto,{GATHER}", metavar="NAME,...", help=ways)
    add("--codec", default="identity", metavar="NAME,...", help="how rows are written on the wire (identity)")
    add("--experts", default="auto", metavar="NAME,...", help="which implementations of experts (auto)")
    add("--users", default="4", metavar="N,...", help="requests at once over all ranks, one or several (4)")
    add("--input", default="24", metavar="N,...", help="tokens of a prompt (24)")
    add("--output", type=int, default=16, metavar="N", help="tokens of an answer (16)")
    add("--rounds", type=int, default=3, metavar="N", help="answers of a user, the first not counted (3)")
    add("--chunk", metavar="RxS", help="rows and tokens of a step of prompts (1x32; --levers: a quarter)")
    rows = "rows of a rank for which there are steps (powers of two); few are soon recorded"
    add("--sizes", metavar="N,...", help=rows)
    add("--interval", metavar="N,...", help="steps between two deliveries of tokens (1; with --levers 4)")
    add("--drafts", default="0", metavar="N,...", help="tokens that a step drafts: 0, 1, 3 (0)")
    accepted = "count so many drafts as right in the mean, whatever was drafted; figures are labelled forced"
    add("--forced", type=float, metavar="N", help=accepted)
    trained = "train the demo's model on its text for so many steps first; prompts are of held-out text (0)"
    add("--train", type=int, default=0, metavar="N", help=trained)
    off = f"serve the load also without each of {', '.join(LEVERS)}; N loops of each, in turns ({TURNS})"
    add("--levers", type=int, nargs="?", const=TURNS, metavar="N", help=off)
    add("--dtype", choices=tuple(DTYPES), help="of weights and caches (bfloat16 on GPUs, float32 on CPUs)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--json", metavar="FILE", help="put the rows into this result file")
    add("--report", metavar="FILE", help="draw Pareto curves over --users into this HTML file")
    add("--timeout", type=float, metavar="SECONDS", help="until a silent rank ends the run (60)")
    add("--board", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Exit code 0; 1 where a rank was lost, 2 where the input was refused."""
    worker = is_worker()
    settle(args, worker=worker)
    pull_levers(args)
    check(args)
    if not worker:
        check_memory(args.ranks, held_bytes(args), SMALLER)
    return run_on_ranks(args, ("bench", "serve"), partial(_measure, args), worker=worker)


def pull_levers(args: argparse.Namespace) -> None:
    """Fill in `interval` and `chunk`; where levers are compared, so that both are on."""
    if args.interval is None:
        args.interval = "4" if args.levers else "1"
    if args.chunk is None:
        args.chunk = f"1x{-(-min(numbers(args, 'input')) // 4)}" if args.levers else "1x32"


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for what can be refused before any rank starts."""
    from imbrex.runtime.waits import timeout_seconds

    for name, least in (("ranks", 1), ("output", 1), ("rounds", 2)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name} is {getattr(args, name)}: give {least} or more")
    _check_lists(args)
    _chunk(args)
    _check_training(args)
    _check_levers(args)
    config = served_config(args.weights) if args.weights else MODELS[args.model]
    model = args.weights or args.model
    for drafts in numbers(args, "drafts"):
        if drafts:
            Drafting(length=drafts, forced=args.forced)
            if drafts >= args.output:
                raise ValueError(f"--drafts {drafts}: an answer has {args.output} tokens; draft fewer")
            if args.weights or not MODELS[args.model].drafting:
                raise ValueError(f"--drafts {drafts}: {model} has no block to draft with; leave it out")
    longest = max(numbers(args, "input")) + args.output
    if 0 < config.positions < longest:
        raise ValueError(
            f"--input and --output: a request takes {longest} tokens, and {model} was trained for "
            f"{config.positions}; ask for fewer"
        )
    _check_ways(args, config.moe.top_k)
    if args.forced is not None and not any(numbers(args, "drafts")):
        raise ValueError(f"--forced {args.forced:g}: nothing is drafted; give --drafts, or leave it out")
    args.timeout = timeout_seconds(args.timeout)
    _check_files(args)


def _check_lists(args: argparse.Namespace) -> None:
    for name in (*LISTS, *(["sizes"] if args.sizes is not None else [])):
        least = 0 if name == "drafts" else 1
        if min(numbers(args, name)) < least:
            raise ValueError(f"--{name} is {getattr(args, name)}: give numbers of {least} or more")
    slots = -(-max(numbers(args, "users")) // args.ranks)
    if args.sizes is not None and max(numbers(args, "sizes")) > slots:
        raise ValueError(f"--sizes is {args.sizes}: a rank has {slots} rows at most; leave larger ones out")


def _check_ways(args: argparse.Namespace, top_k: int) -> None:
    from imbrex.codec import make_wire
    from imbrex.experts.experts import pick_implementation
    from imbrex.transport import TRANSPORTS, pick

    for name in args.transport.split(","):
        if name in (ALONE, *RIVALS):
            continue
        if name not in ("auto", *TRANSPORTS):
            known = ", ".join(("auto", *RIVALS, ALONE, *TRANSPORTS))
            raise ValueError(f"--transport: {name!r} is not known; use some of {known}")
        if name == "allreduce" and args.ranks > 1:
            raise ValueError(
                f"--transport {name}: it wants equal tokens, and ranks serve their own; leave it out"
            )
        pick(name, num_ranks=args.ranks, top_k=top_k)
    for codec in args.codec.split(","):
        make_wire(codec)
    for experts in args.experts.split(","):
        # Refused, not replaced: rows are named after it.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            chosen, reason = pick_implementation(experts)
        if experts not in ("auto", chosen):
            raise ValueError(f"--experts {experts}: {reason}; leave it out")


def _check_files(args: argparse.Namespace) -> None:
    from imbrex.bench.results import check_file, check_results

    for name in ("json", "report"):
        path = getattr(args, name)
        if path is None:
            continue
        check_file(name, path, **({"json": args.json} if name == "report" else {}))
        # Of a pipe or a device nothing is read, and none is replaced.
        if Path(path).exists() and not Path(path).is_file():
            raise ValueError(f"--{name} {path}: that is no file that can be written; give another")
    if args.json:
        check_results(args.json, QUESTION)


def held_bytes(args: argparse.Namespace) -> int:
    """Bytes of this machine's memory that the ranks hold together, at least: experts, embeddings and heads,
    caches, tokens between two deliveries. On GPUs they are not this machine's."""
    if args.device == "cuda":
        return 0
    config = served_config(args.weights) if args.weights else MODELS[args.model]
    moe, itemsize = config.moe, DTYPES[args.dtype].itemsize
    experts = (config.num_layers + config.drafting) * moe.num_experts * 3 * moe.intermediate_size
    rows, chunk = _chunk(args)[0], _longest_chunk(args)
    slots = max(*numbers(args, "users"), rows)
    room = max(numbers(args, "input")) + args.output
    cache = slots * max(room, chunk) * config.cache_bytes(itemsize)
    ring = slots * min(max(numbers(args, "interval")), room) * (1 + max(numbers(args, "drafts"))) * 8
    values = (experts + (args.ranks + 1) * config.vocabulary) * moe.hidden_size
    return values * itemsize + cache + ring


def _check_training(args: argparse.Namespace) -> None:
    if args.train < 0:
        raise ValueError(f"--train is {args.train}: give 0 or more")
    if args.train and (
        args.weights or args.model != "demo" or {ALONE, *RIVALS} & set(args.transport.split(","))
    ):
        raise ValueError(
            f"--train {args.train}: the demo's model is trained, over a transport of the layer's; give "
            "--model demo and --transport auto, alltoall or another"
        )


def _check_levers(args: argparse.Namespace) -> None:
    if args.levers is None:
        return
    if args.levers < 1:
        raise ValueError(f"--levers {args.levers}: give 1 or more loops of each")
    if args.report:
        raise ValueError("--levers: curves are of engines with all of them; leave --report out")
    graphs = args.device == "cuda"
    if not any(without(settings_of(args, *swept, graphs=graphs), swept[2]) for swept in _swept(args)):
        raise ValueError(f"--levers: {NONE_ON}")


def numbers(args: argparse.Namespace, name: str) -> list[int]:
    """The numbers of an option, each once: rows of a result file are told apart by them."""
    text = getattr(args, name)
    if not all(word.isdecimal() for word in text.split(",")):
        raise ValueError(f"--{name} is {text}: give whole numbers, with commas between")
    return list(dict.fromkeys(map(int, text.split(","))))


def _longest_chunk(args: argparse.Namespace) -> int:
    """The tokens of a chunk; where levers are compared, of a whole prompt."""
    return max(_chunk(args)[1], max(numbers(args, "input")) if args.levers else 0)


def _chunk(args: argparse.Namespace) -> tuple[int, int]:
    rows, cross, length = args.chunk.partition("x")
    if not (cross and rows.isdecimal() and length.isdecimal() and int(rows) and int(length)):
        raise ValueError(f"--chunk is {args.chunk}: give rows and tokens a row, as 1x32")
    return int(rows), int(length)


def _measure(args: argparse.Namespace, rank: int, board: PhaseBoard) -> None:
    os.environ["IMBREX_TIMEOUT_S"] = str(args.timeout)
    device = join(args)
    rows: list[dict[str, Any]] = []
    keep = _writer(args) if args.json and rank == 0 else None
    tell = _tell if rank == 0 else lambda line: None
    for way in ways_from_words(args):
        gc.collect()  # the models of two ways may not fit a GPU
        for row in compare(args, way, device, board, tell):
            rows.append(row)
            if keep is not None:
                keep(rows)  # what there is, if the run is cut off
    if rank == 0:
        show(args, rows)
        if args.report:
            from imbrex.bench.serve.report import write_report

            facts = {name: str(rows[0]["case"][name]) for name in FACTS}
            write_report(args.report, facts=facts, rows=rows)
    board.write("done")
    dist.barrier()


def _tell(line: str) -> None:
    """Print how far the run is, to standard error: tables alone are what the command prints."""
    print(line, file=sys.stderr, flush=True)


def _writer(args: argparse.Namespace) -> Callable[[Sequence[Mapping[str, Any]]], None]:
    """A function that puts rows of this run into the result file, in the place of those before."""
    from imbrex.bench.results import describe_run, write_results

    words = [w for w in words_of(args) if w not in ("--board", args.board)]
    run = describe_run(shlex.join(["imbrex", "bench", "serve", *words]))
    return lambda rows: write_results(args.json, QUESTION, run, rows)


def ways_from_words(args: argparse.Namespace) -> list[Way]:
    """The ways under the words given; the rivals send rows as they are and compute experts themselves, and
    alone nothing is sent."""
    ways = list[Way]()
    for transport in args.transport.split(","):
        plain, alone = transport in RIVALS, transport == ALONE
        codecs = ["identity"] if plain or alone else args.codec.split(",")
        experts = ["auto"] if plain else args.experts.split(",")
        ways += [Way(transport=transport, codec=c, experts=e) for c, e in product(codecs, experts)]
    return list(dict.fromkeys(ways))


def compare(
    args: argparse.Namespace,
    way: Way,
    device: torch.device,
    board: PhaseBoard,
    tell: Callable[[str], None] = lambda line: None,
) -> Iterator[dict[str, Any]]:
    """A row for every number of users, of drafts, of steps between deliveries and of tokens in; and without
    every lever where they are compared. Those of an engine come when its loops have ended. tell: called with
    a line for the model and every engine that begins, and for every loop that has ended."""
    group = dist.group.WORLD
    assert group is not None
    tell(f"{way.name}: makes the model" + (f", trains it for {args.train} steps" if args.train else ""))
    model, text = _make(args, way, device, group, board)
    for swept in _swept(args):
        graphs = device.type == "cuda" and takes_graphs(model, way)
        settings = settings_of(args, *swept, graphs=graphs)
        kinds = {"": settings} | (without(settings, swept[2]) if args.levers else {})
        loads = [
            Load(users=users, input=swept[2], output=args.output, rounds=args.rounds)
            for users in numbers(args, "users")
        ]
        points: dict[str, list[list[dict[str, Any]]]] = {off: [] for off in kinds}
        for off, kind in list(kinds.items()) * (args.levers or 1):
            begun = _announcer(board, f"serving {way.name}")
            what = f"{way.name}, {swept[2]} in, {kind.drafting.length} drafts, interval {kind.interval}"
            what += f", without {off}" if off else ""
            tell(f"{what}: begins")
            ended = partial(_tell_point, tell, what)
            points[off].append(points_of(Engine(model, kind, group), loads, text, begun, ended))
        for off, place in product(kinds, range(len(loads))):
            loops, whole = ([turn[place] for turn in points[name]] for name in (off, ""))
            case = case_of(args, loads[place], settings) | ({"off": off} if off else {})
            row = {"op": "serve", "impl": way.name, "case": case} | middle(loops)
            yield row | ({"gain": gains(whole, loops)} if off else {})
    for module in model.modules():
        if isinstance(module, MoELayer):
            module.close()


def _swept(args: argparse.Namespace) -> list[tuple[int, ...]]:
    return list(product(*(numbers(args, name) for name in SWEPT)))


def settings_of(
    args: argparse.Namespace, drafts: int, interval: int, tokens: int, *, graphs: bool
) -> Settings:
    """The engine's settings for prompts of so many tokens."""
    return Settings(
        slots=-(-max(numbers(args, "users")) // args.ranks),
        room=tokens + args.output,
        chunk=_chunk(args),
        interval=interval,
        drafting=Drafting(length=drafts, forced=args.forced if drafts else None),
        graphs=graphs,
        sizes=tuple(numbers(args, "sizes")) if args.sizes else (),
    )


def _announcer(board: PhaseBoard, phase: str) -> Callable[[int], None]:
    """Writes the number of every step on the board; until the first, this rank is in set-up."""

    def begun(step: int) -> None:
        board.step = step
        board.write(phase)

    begun(-1)
    return begun


def _tell_point(tell: Callable[[str], None], what: str, load: Load, point: Mapping[str, Any]) -> None:
    rank, user = (_number(point[name]) for name in ("tokens_per_s_gpu", "tokens_per_s_user"))
    tell(f"{what}, {load.users} users: {rank} tokens/s a rank, {user} a user")


def points_of(
    engine: Engine,
    loads: Sequence[Load],
    text: torch.Tensor | None,
    begun: Callable[[int], object] = lambda step: None,
    ended: Callable[[Load, dict[str, Any]], object] = lambda load, point: None,
) -> list[dict[str, Any]]:
    """A point of every load; `ended` is called with both. Nothing refers to the engine behind it, so that its
    caches and graphs go before the next engine's come."""
    points = list[dict[str, Any]]()
    for load in loads:
        points.append(serve(engine, load, engine.host_group, text=text, begun=begun))
        ended(load, points[-1])
    engine.programs.clear()
    engine.answered = None
    return points


def _make(
    args: argparse.Namespace, way: Way, device: torch.device, group: dist.ProcessGroup, board: PhaseBoard
) -> tuple[Decoder, torch.Tensor | None]:
    """The model, and the text that prompts are cut from where it was trained."""
    drafts = max(numbers(args, "drafts"))
    begun = _announcer(board, f"serving {way.name}")
    longest = max(numbers(args, "input")) + args.output + max(_longest_chunk(args), 2 * drafts + 1)
    model = make_model(
        str(Path(args.weights).resolve()) if args.weights else args.model,
        way,
        group,
        positions=max(longest, LENGTH),
        device=device,
        dtype=DTYPES[args.dtype],
        drafting=drafts > 0,
        whole_head=args.train > 0,
    )
    if not args.train:
        return model, None
    from imbrex.demo.corpus import load_corpus

    corpus = load_corpus(length=LENGTH + 1)
    train(model, corpus, args.train, group, begun=begun)
    model.head.split(group)
    return model, corpus.held_out


def case_of(args: argparse.Namespace, load: Load, settings: Settings) -> dict[str, Any]:
    """The settings that tell rows of a result file apart."""
    drafting = settings.drafting
    forced = {"forced": drafting.forced} if drafting.forced is not None else {}
    return {
        "model": Path(args.weights).name if args.weights else args.model,
        "W": args.ranks,
        "users": load.users,
        "input": load.input,
        "output": load.output,
        "drafts": drafting.length,
        "interval": settings.interval,
        "dtype": args.dtype,
        "weights": "loaded" if args.weights else f"{args.train} steps" if args.train else "random",
    } | forced


def show(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    """The rows as tables on the terminal."""
    from rich.console import Console

    console = Console(width=max(150, Console().width))
    console.print(_title(args, rows[0]["case"]), soft_wrap=True, highlight=False)
    whole = [row for row in rows if "off" not in row["case"]]
    console.print(_table("", HEADS, map(_cells, whole)))
    if any(row["tokens_per_s_gpu"] is None for row in rows):
        console.print(TOO_SHORT, highlight=False)
    if args.output == 1:
        console.print(ONE_TOKEN, highlight=False)
    on_gpu = "no_step_share" in rows[0]
    console.print(_table(ABOUT_HOST, (*HOST_HEADS, IDLE) if on_gpu else HOST_HEADS, map(_host_cells, whole)))
    if on_gpu:
        console.print(ABOUT_IDLE, highlight=False)
    if args.levers:
        about = f"{ABOUT_LEVERS}, {args.levers} loop{'s' * (args.levers > 1)} in turns"
        console.print(_table(about, levers.HEADS, levers.cells_of(rows)))
        for about in levers.captions(rows):
            console.print(about, highlight=False)


def _title(args: argparse.Namespace, case: Mapping[str, Any]) -> str:
    from imbrex.bench.machine import cores, hardware

    about = hardware()
    where = f"{about['count']} x {about['gpu']}" if args.device == "cuda" else f"{cores()} CPU cores"
    weights = {"random": "random weights", "loaded": "its own weights"}.get(case["weights"])
    ranks = f"{args.ranks} rank{'s' * (args.ranks > 1)}"
    title = f"{case['model']}, {ranks}, {args.input} tokens in and {args.output} out, {args.dtype}, "
    return title + f"{weights or f'{args.train} steps of training'}, on {where}"


def _table(title: str, heads: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
    from rich.table import Table

    table = Table(title=title or None, title_justify="left")
    for head in heads:
        table.add_column(head, justify="left" if head in ("", "without") else "right")
    for line in lines:
        table.add_row(*line)
    return table


FACTS = ("model", "W", "dtype", "weights")
"""The settings that are alike in all rows of a run."""
HEADS = ("", "users", "in", "drafts", "tokens a step", "interval", "tokens/s a rank", "tokens/s a user")
HEADS += ("gap p50, p99 ms", "step ms")
HOST_HEADS = ("", "users", "in", "drafts", "interval", *HostTime.NAMES, "its own", "launches")
ABOUT_HOST = "The host, us a step (agree: until the slowest rank is there); its own: without model and wait"
IDLE = "no step, %"
ABOUT_IDLE = f"{IDLE}: of a GPU's time, that in which no step ran"

ONE_TOKEN = "-: the one token of an answer comes of its prompt's last chunk; no step decodes, nothing follows"
TOO_SHORT = "-: too few tokens while every user is served; give more --rounds or a longer --output"
ABOUT_LEVERS = "The same load without a lever; host: its own work, without agree"


def _cells(row: dict[str, Any]) -> list[str]:
    case, gap = row["case"], row["gap_ms"]
    return [
        row["impl"],
        str(case["users"]),
        str(case["input"]),
        _drafts(case),
        f"{row['tokens_per_row_step']:.2f}" if row["tokens_per_row_step"] else "-",
        str(case["interval"]),
        *(_number(row[name]) for name in ("tokens_per_s_gpu", "tokens_per_s_user")),
        f"{gap['p50']:.2f}, {gap['p99']:.2f}" if gap else "-",
        f"{row['step_ms']:.2f}",
    ]


def _host_cells(row: dict[str, Any]) -> list[str]:
    case, host = row["case"], row["host_us"]
    words = [row["impl"], *(str(case[name]) for name in ("users", "input"))]
    words += [_drafts(case), str(case["interval"])]
    words += [f"{us:.0f}" for us in (*host.values(), levers.own_us(row))]
    words.append(f"{row['launches']:.1f}")
    return [*words, f"{100 * row['no_step_share']:.2f}"] if "no_step_share" in row else words


def _drafts(case: Mapping[str, Any]) -> str:
    forced = f" ({case['forced']:g} forced)" if "forced" in case else ""
    return f"{case['drafts']}{forced}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
