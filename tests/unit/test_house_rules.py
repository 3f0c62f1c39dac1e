"""The house rules hold, and each rule's checker fails on a sample that breaks it."""

from __future__ import annotations

import ast
import re
import statistics
import textwrap
from pathlib import Path

import pytest
import torch

from tests import doors, house
from tests.as_a_user import run_python
from tests.faults.__main__ import PACKAGE, why_not_fault
from tests.faults.known import FAULTS

pytestmark = pytest.mark.untraced
ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "src").rglob("*.py"))
KERNELS = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "src").rglob("*.cu*"))
OTHERS = sorted(
    p.relative_to(ROOT).as_posix()
    for where in ("tests", "benchmarks", "docs")
    for p in (ROOT / where).rglob("*.py")
)
MODULES = frozenset(map(house.module_of, SOURCES))


def read(path: str) -> str:
    return (ROOT / path).read_text()


def collect(checker, paths: list[str]) -> list[str]:
    return [breach for path in paths for breach in checker(path, read(path))]


def test_imports_point_down_the_floors() -> None:
    assert collect(lambda p, t: house.upward_imports(p, t, MODULES), SOURCES) == []


def test_the_root_is_small() -> None:
    assert house.crowded_root(SOURCES) == []


def test_files_are_short() -> None:
    assert collect(house.long_files, SOURCES + KERNELS + OTHERS) == []


def test_lines_of_kernels_are_short() -> None:
    assert collect(house.wide_lines, KERNELS) == []


def test_functions_are_short() -> None:
    assert collect(house.long_functions, SOURCES + OTHERS) == []


def test_files_are_named_after_their_idea() -> None:
    assert [b for path in SOURCES + KERNELS + OTHERS for b in house.forbidden_names(path)] == []


def test_contracts_are_small_frozen_values() -> None:
    files = [path for path in SOURCES if path.startswith("src/imbrex/contracts/")]
    assert len(files) == 4
    assert collect(house.wide_contracts, files) == []


def test_hazards_stay_at_home() -> None:
    assert collect(house.strayed_hazards, SOURCES + KERNELS) == []


def test_structs_of_kernels_are_written_once() -> None:
    assert collect(house.structs_written_twice, SOURCES) == []


def test_copies_to_the_host_say_why() -> None:
    assert collect(house.silent_syncs, SOURCES) == []


def test_tensors_name_their_dtype_and_device() -> None:
    assert collect(house.default_kinds, SOURCES) == []


def test_docstrings_can_be_read_alone() -> None:
    assert collect(house.headless_docstrings, SOURCES) == []


def test_families_of_kernels_take_from_those_below() -> None:
    assert collect(house.kernel_climbs, SOURCES + KERNELS) == []
    include = '#include "exchange/reduce.cuh"\n'
    assert len(house.kernel_climbs("src/imbrex/kernels/routing/split.cuh", include)) == 1
    assert house.kernel_climbs("src/imbrex/kernels/fused/home.cu", include) == []
    upward = "from imbrex.kernels.ffn.ffn import ffn\n"
    assert len(house.kernel_climbs("src/imbrex/kernels/gemm/gemm.py", upward)) == 1
    assert len(house.kernel_climbs("src/imbrex/kernels/attic/gemm.py", "")) == 1


def test_a_discarded_loop_takes_no_other_along() -> None:
    assert collect(house.loops_that_take_others, KERNELS) == []
    head, loop = "    if constexpr (!C::kQuantises)", "#pragma unroll\n        for (int i = 0; i < 2; ++i)"
    assert len(house.loops_that_take_others("a.cuh", f"{head}\n{loop} {{\n")) == 1
    assert house.loops_that_take_others("a.cuh", f"{head} {{\n{loop} {{\n") == []
    assert house.loops_that_take_others("a.cuh", f"{head}\n{loop} a[i] = 0;\n") == []


def test_no_banners() -> None:
    assert collect(house.banners, SOURCES + KERNELS + OTHERS) == []


TEXTS = {path: read(path) for path in SOURCES}
DOORS = doors.doors_of(TEXTS)


RULES = {
    "parameters": house.many_parameters,
    "private": doors.private_reaches,
    "probes": doors.probes,
    "ways": doors.asked_ways,
    "doors": lambda path, text: doors.private_doors(path, text, DOORS, MODULES),
    "bare": house.bare_participles,
}


@pytest.mark.parametrize("rule", RULES)
def test_no_file_breaks(rule: str) -> None:
    breaches = collect(RULES[rule], SOURCES)
    assert breaches == [], "\n".join(breaches)


def test_no_file_is_a_fragment() -> None:
    assert house.fragments(TEXTS, MODULES) == []


def test_no_files_import_each_other() -> None:
    files = TEXTS | {path: read(path) for path in OTHERS if path.startswith("benchmarks/")}
    assert doors.circles(files, frozenset(map(house.module_of, files))) == []


def test_benchmarks_take_no_command() -> None:
    benchmarks = [path for path in OTHERS if path.startswith("benchmarks/")]
    assert len(benchmarks) > 10
    assert collect(doors.imported_commands, benchmarks) == []
    for text in ("from imbrex.cli import plan\n", "from imbrex import cli\n", "import imbrex.cli.plan\n"):
        assert len(doors.imported_commands("benchmarks/plan.py", text)) == 1
    assert doors.imported_commands("benchmarks/plan.py", "from imbrex.bench import results\n") == []


SEVENTEEN = ", ".join(f"p{i}" for i in range(9))
SAMPLES_OF_RULES = [
    ("parameters", "src/imbrex/guards.py", f"def f({SEVENTEEN}):\n    pass\n"),
    ("private", "src/imbrex/layer.py", "def f(exchange):\n    return exchange._crossings\n"),
    ("probes", "src/imbrex/layer.py", "def f(self):\n    return hasattr(self.transport, 'nodes')\n"),
    ("ways", "src/imbrex/layer.py", "def f(x):\n    return isinstance(x.transport, Nvlink)\n"),
    ("ways", "src/imbrex/layer.py", "def f(x):\n    return isinstance(x, int | BytesDispatcher)\n"),
    ("doors", "src/imbrex/adapters/vllm.py", "from imbrex.kernels.heap import Heap\n"),
    ("doors", "src/imbrex/adapters/vllm.py", "from ..kernels.jit import load\n"),
    ("doors", "src/imbrex/adapters/vllm.py", "import imbrex.kernels.heap\n"),
    ("doors", "src/imbrex/adapters/vllm.py", "from imbrex.exchange import alone\n"),
    ("doors", "src/imbrex/adapters/vllm.py", "from imbrex.exchange import rows\nrows.by_kernels(x)\n"),
    ("doors", "src/imbrex/adapters/vllm.py", "import imbrex\nimbrex.VERSION\n"),
    ("bare", "src/imbrex/layer.py", "found = 1\n"),
    ("bare", "src/imbrex/layer.py", "def f(told):\n    pass\n"),
    ("bare", "src/imbrex/layer.py", "def f(self):\n    self._kept = 1\n"),
    ("bare", "src/imbrex/layer.py", "def _given():\n    pass\n"),
]
FINE = [
    ("parameters", "src/imbrex/adapters/vllm.py", f"def f({SEVENTEEN}):\n    pass\n"),
    ("private", "src/imbrex/layer.py", "class A:\n    def _f(self, other):\n        return other._f\n"),
    ("probes", "src/imbrex/layer.py", "def f(module):\n    return hasattr(module, 'weight')\n"),
    ("ways", "src/imbrex/layer.py", "def f(x):\n    return isinstance(x, Tensor)\n"),
    ("doors", "src/imbrex/adapters/vllm.py", "from imbrex.exchange import Exchange\n"),
    ("doors", "src/imbrex/adapters/vllm.py", "from imbrex.exchange import rows\nrows.expand(x, y)\n"),
    ("doors", "src/imbrex/adapters/vllm.py", "from imbrex import overlap\noverlap.make('serial')\n"),
    ("doors", "src/imbrex/adapters/vllm.py", "from imbrex.contracts import Traffic\n"),
    ("bare", "src/imbrex/layer.py", "answer = 1\n"),
]


@pytest.mark.parametrize(("rule", "path", "text"), SAMPLES_OF_RULES)
def test_a_breach_is_found(rule: str, path: str, text: str) -> None:
    assert len(RULES[rule](path, text)) == 1


@pytest.mark.parametrize(("rule", "path", "text"), FINE)
def test_what_keeps_a_rule_is_fine(rule: str, path: str, text: str) -> None:
    assert RULES[rule](path, text) == []


def test_names_that_adapters_take_are_documented() -> None:
    table: set[tuple[str, str]] = set()
    room = ""
    for line in read("docs/extending.md").partition("## An adapter")[2].splitlines():
        if line.startswith("| "):
            _, first, names, *_ = line.split("|")
            room = first.strip(" `") or room
            table |= {(room, name) for name in re.findall(r"`(\w+)`", names)}
    assert [(room, name) for room, name in table if name not in DOORS[room]] == []
    for path, text in TEXTS.items():
        for _, module, name in doors.takings(ast.parse(text), house.package_of(path), MODULES):
            if house.room(house.module_of(path)) == "adapters" and f"{module}.{name}" not in MODULES:
                public = house.room(module) in ("", "adapters", "contracts")
                assert public or (module, name) in table, (
                    f"{path}: {module}.{name} is not in docs/extending.md"
                )


def test_a_circle_is_found() -> None:
    first, second = "src/imbrex/codec/a.py", "src/imbrex/codec/b.py"
    files = {first: "from imbrex.codec import b\n", second: "def f():\n    import imbrex.codec.a\n"}
    modules = frozenset({"imbrex.codec.a", "imbrex.codec.b"})
    assert len(doors.circles(files, modules)) == 2
    files[second] = "if TYPE_CHECKING:\n    import imbrex.codec.a\n"
    assert len(doors.circles(files, modules)) == 2
    files[second] = "import torch\n"
    assert doors.circles(files, modules) == []
    fits = {f"benchmarks/{a}.py": f"from benchmarks import {b}\n" for a, b in ("ab", "ba")}
    assert len(doors.circles(fits, frozenset({"benchmarks.a", "benchmarks.b"}))) == 2


def test_a_fragment_is_found() -> None:
    files = {"src/imbrex/codec/a.py": "x = 1\n", "src/imbrex/codec/b.py": "from imbrex.codec import a\n" * 41}
    modules = frozenset({"imbrex.codec.a", "imbrex.codec.b"})
    assert len(house.fragments(files, modules)) == 1
    files["src/imbrex/codec/c.py"] = files["src/imbrex/codec/b.py"]
    assert house.fragments(files, modules | {"imbrex.codec.c"}) == []


IMPORT = """
import sys, time, threading
# The processor's time: other processes on the machine are not this import's cost.
begin = time.process_time()
import torch
import torch.distributed as dist
of_torch = time.process_time() - begin
loaded, threads = set(sys.modules), threading.active_count()
begin = time.process_time()
from imbrex import *
seconds = time.process_time() - begin
assert not torch.cuda.is_initialized(), "a CUDA context"
assert not (dist.is_available() and dist.is_initialized()), "a process group"
assert threading.active_count() == threads, "a thread"
heavy = {"triton", "torch._dynamo", "torch._inductor", "transformers", "plotly", "rich", "cuda.core"}
started = heavy & (set(sys.modules) - loaded)
assert not started, started
# On a slower machine: as on a usual one, where torch takes 2.3 s.
print(seconds * min(1.0, 2.3 / of_torch))
"""


def test_importing_is_quick_and_starts_nothing() -> None:
    seconds: list[float] = []
    while len(seconds) < 8 and min(seconds, default=1.0) >= 0.3:  # the first may compile; then 0.11 to 0.2 s
        seconds.append(float(run_python(IMPORT)))
    assert min(seconds) < 0.3, f"importing imbrex adds {statistics.median(seconds):.2f} s to torch's"


def test_the_command_says_its_version_without_torch() -> None:
    """Which takes seconds to load; so do the list of commands and a word that is none."""
    say = "import sys, imbrex.cli\ntry: imbrex.cli.main({})\nexcept SystemExit: pass\n"
    say += "assert 'torch' not in sys.modules"
    import imbrex

    assert run_python(say.format(["--version"])).strip() == f"imbrex {imbrex.__version__}"
    assert "netlab" in run_python(say.format(["--help"]))
    run_python(say.format(["fly"]))


def test_public_names_are_few_and_documented() -> None:
    import imbrex

    names = getattr(imbrex, "__all__", ())
    assert 0 < len(names) <= 16
    for name in names:
        value = getattr(imbrex, name)
        assert isinstance(value, str) or value.__doc__, f"imbrex.{name} has no docstring"


LAYER = "src/imbrex/layer.py"
SAMPLES = [
    ("src/imbrex/codec/plan.py", "from imbrex.layer import MoELayer\n"),
    ("src/imbrex/codec/plan.py", "def f():\n    import imbrex.exchange\n"),
    ("src/imbrex/codec/plan.py", "from imbrex import layer\n"),
    ("src/imbrex/codec/plan.py", "from .. import layer\n"),
    ("src/imbrex/codec/zfp.py", "from ..exchange import Exchange\n"),
    ("src/imbrex/codec/plan.py", "from imbrex.placement import contiguous\n"),
    ("src/imbrex/codec/plan.py", "import imbrex\n"),
    ("src/imbrex/attic/old.py", "import torch\n"),
]


@pytest.mark.parametrize(("path", "text"), SAMPLES)
def test_an_upward_import_is_found(path: str, text: str) -> None:
    modules = frozenset({"imbrex.layer", "imbrex.exchange", "imbrex.codec", "imbrex.placement"})
    assert len(house.upward_imports(path, text, modules)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (LAYER, "from imbrex.exchange import Exchange\nfrom imbrex.contracts import Plan\n"),
        ("src/imbrex/router/router.py", "from imbrex.router.gates import softmax\n"),
        ("src/imbrex/codec/zfp.py", "from .rounding import half\nimport torch\n"),
        ("src/imbrex/__init__.py", "from imbrex.layer import MoELayer\n"),
    ],
)
def test_a_downward_import_is_fine(path: str, text: str) -> None:
    assert house.upward_imports(path, text, frozenset({"imbrex.router.gates", "imbrex.exchange"})) == []


def test_a_crowded_root_is_found() -> None:
    paths = [f"src/imbrex/{name}.py" for name in "abcdefghi"]
    assert house.crowded_root([*paths[:8], "src/imbrex/codec/zfp.py"]) == []
    assert len(house.crowded_root(paths)) == 1


def test_long_files_and_functions_are_found() -> None:
    assert house.long_files("a.py", "x\n" * 600) == []
    assert len(house.long_files("a.py", "x\n" * 601)) == 1
    assert house.wide_lines("a.cu", "x" * 110 + "\n") == []
    assert len(house.wide_lines("a.cu", "\n" + "x" * 111)) == 1
    body = "    x = 1\n" * 40
    docstring = '    """One.\n\n    Two.\n    """\n'
    assert house.long_functions("a.py", f"def f():\n{body}") == []
    assert house.long_functions("a.py", f"def f():\n{docstring}{body}") == []
    assert len(house.long_functions("a.py", f"class C:\n  def f(self):\n{body}    x = 1\n")) == 1


def test_a_nameless_file_is_found() -> None:
    assert len(house.forbidden_names("src/imbrex/plan_utils.py")) == 1
    assert house.forbidden_names("src/imbrex/database.py") == []


def test_a_wide_or_mutable_contract_is_found() -> None:
    fields = "".join(f"    f{i}: int\n" for i in range(9))
    frozen = "@dataclass(frozen=True, kw_only=True, slots=True)\n"
    assert len(house.wide_contracts("c.py", f"{frozen}class A:\n{fields}")) == 1
    assert len(house.wide_contracts("c.py", "@dataclass\nclass A:\n    x: int\n")) == 1
    assert (
        len(house.wide_contracts("c.py", "@dataclass(frozen=True, slots=True)\nclass A:\n    x: int\n")) == 1
    )
    assert house.wide_contracts("c.py", f"{frozen}class A:\n    x: int\n") == []


@pytest.mark.parametrize(
    "text",
    [
        '"""What a file holds."""\n',
        'MOST = 16\n"""That can route."""\n',
        'class A:\n    x: int\n    """Of a row."""\n',
        'def f():\n    """Whose state it is."""\n',
        'def f():\n    """The same of rows."""\n',
        'POLL_S = 1\n"""Between two looks, in seconds."""\n',
        'def f():\n    """Its sum."""\n',
        'def f():\n    """Called when rows have come."""\n',
        'class A:\n    """rows_RD, sums: as they came. more: the rest."""\n',
        'def f():\n    """Rows as they came\n\n    Then more.\n    """\n',
    ],
)
def test_a_headless_docstring_is_found(text: str) -> None:
    assert len(house.headless_docstrings("a.py", text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        '"""Which rows cross, seen from one rank."""\n',
        'class A:\n    """The rows. more: the rest."""\n',
        'def f():\n    """Encoded rows, and rows that are kept for the backward."""\n',
        'def f():\n    """int64 [T] of this rank:\n\n        f()\n    """\n',
        "MOST = 16\n",
    ],
)
def test_a_docstring_that_can_be_read_alone_is_fine(text: str) -> None:
    assert house.headless_docstrings("a.py", text) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("src/imbrex/kernels/push.cu", 'asm volatile ("trap;");'),
        ("src/imbrex/kernels/ffn/operators.py", "y = tl.inline_asm_elementwise('x')"),
        ("src/imbrex/exchange.py", "@torch.library.custom_op('imbrex::move')"),
        ("src/imbrex/transport/nvlink.py", "import torch.distributed._symmetric_memory as symm"),
        ("src/imbrex/layer.py", "side = torch.cuda.Stream()"),
    ],
)
def test_a_strayed_hazard_is_found(path: str, text: str) -> None:
    assert len(house.strayed_hazards(path, text)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("src/imbrex/kernels/ptx/tma.cuh", 'asm volatile ("trap;");'),
        ("src/imbrex/exchange/autograd.py", "@torch.library.custom_op('imbrex::move')"),
        ("src/imbrex/kernels/heap.py", "import torch.distributed._symmetric_memory as symm"),
        ("src/imbrex/runtime/streams.py", "side = torch.cuda.Stream()"),
    ],
)
def test_a_hazard_at_home_is_fine(path: str, text: str) -> None:
    assert house.strayed_hazards(path, text) == []


@pytest.mark.parametrize("text", ["class Push(ctypes.Structure):\n", 'args = struct.pack("<2Q", x, y)\n'])
def test_a_struct_that_is_written_twice_is_found(text: str) -> None:
    assert len(house.structs_written_twice("src/imbrex/kernels/exchange/push.py", text)) == 1
    assert house.structs_written_twice("src/imbrex/observe/ring.py", text) == []


@pytest.mark.parametrize(
    "text",
    [
        "n = counts.sum().item()\n",
        "for n in counts.tolist():\n    pass\n",
        "if flag.item():\n    # host sync: too late\n    pass\n",
        "return x.to('cpu')\n",
        "for rank, n in enumerate(counts_WW.tolist()):\n    x[rank, n].item()\n",
        "# host sync: this one\n\nn = x.cpu()\n",
    ],
)
def test_a_silent_sync_is_found(text: str) -> None:
    text = "def f():\n" + textwrap.indent(text, "    ")
    assert len(house.silent_syncs(LAYER, text)) == 1
    assert house.silent_syncs("src/imbrex/cli/demo.py", text) == []


@pytest.mark.parametrize(
    "text",
    [
        "# host sync: sizes of the receive buffer\nn = counts.sum().item()\n",
        "counts = transport.exchange_counts(own)\nfor n in counts.T.tolist():\n    pass\n",
        "x = y.to('cuda')\nz = items.item\n",
        "send, receive = handle.traffic.splits_2W[0].tolist()\n",
    ],
)
def test_a_sync_with_its_reason_is_fine(text: str) -> None:
    text = "def f():\n" + textwrap.indent(text, "    ")
    assert house.silent_syncs(LAYER, text) == []


@pytest.mark.parametrize(
    ("call", "missing"),
    [
        ("torch.empty(3, device=x.device)", "dtype"),
        ("torch.zeros(3, dtype=torch.int64)", "device"),
        ("torch.tensor([0.5])", "device and dtype"),
        ("torch.full((2,), 1.0, device=x.device)", "dtype"),
        ("torch.arange(4)", "device"),
        ("torch.arange(0.5, 4, device=x.device)", "dtype"),
        ("torch.rand(3, generator=drawn)", "device and dtype"),
        ("torch.eye(2, device='cpu')", "dtype"),
        ("torch.linspace(0, 1, 5, dtype=torch.float32)", "device"),
    ],
)
def test_a_default_dtype_or_device_is_found(call: str, missing: str) -> None:
    name = call.split("(")[0]
    assert house.default_kinds(LAYER, f"y = {call}\n") == [f"{LAYER}:1: {name} without {missing}"]
    assert house.default_kinds("src/imbrex/cli/demo.py", f"y = {call}\n") == []


@pytest.mark.parametrize(
    "call",
    [
        "torch.empty(3, dtype=torch.float32, device=x.device)",
        "torch.arange(4, device='cpu')",
        "torch.zeros_like(x)",
        "x.new_empty(3)",
        "torch.randn(3, **FLOATS)",
    ],
)
def test_a_tensor_of_a_said_kind_is_fine(call: str) -> None:
    assert house.default_kinds(LAYER, f"y = {call}\n") == []


def test_a_banner_is_found() -> None:
    assert len(house.banners("a.py", "# -------- routing\n")) == 1
    assert house.banners("a.py", "# a - b, and -1 drops\n") == []


def test_empty_is_poisoned_here() -> None:
    assert torch.empty(3).isnan().all()
    assert torch.ones(2).new_empty(3).isnan().all()
    assert torch.empty_like(torch.ones(2, dtype=torch.bfloat16)).isnan().all()
    torch.empty(3, dtype=torch.int64)


def test_every_known_fault_can_be_put_in() -> None:
    """The texts that `make faults` replaces follow the code, and so do the tests that should notice."""
    assert [why for fault in FAULTS if (why := why_not_fault(fault, ROOT / PACKAGE))] == []
    files = {test.split("::")[0] for fault in FAULTS for test in fault.tests}
    assert [file for file in sorted(files) if not (ROOT / "tests" / file).is_file()] == []
