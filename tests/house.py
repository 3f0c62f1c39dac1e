"""The house rules of design and style, each a function from source text to the places that break it.

A breach is one line: `file:line: what`. `tests/unit/test_house_rules.py` applies them to the repository and
shows each failing on a sample.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

MAX_FILE_LINES = 600
MIN_FILE_LINES = 40
"""Of a file that one other imports: below, the two are one idea."""
MAX_PARAMETERS = 8
MAX_KERNEL_COLUMNS = 110
MAX_FUNCTION_LINES = 40
MAX_FIELDS = 8
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "manager", "data", "info", "common", "misc"}

FLOORS: tuple[frozenset[str], ...] = tuple(
    frozenset(floor.split())
    for floor in (
        "contracts",
        "runtime",
        "observe kernels cost",
        "schedule router codec placement",
        "transport experts",
        "exchange simulate",
        "overlap balancer",
        "ranks",
        "guards",
        "layer",
        "testing parallel",
        "adapters",
        "launch",
        "serve",
        "demo",
        "bench",
        "reproduce",
        "cli",
    )
)
"""The rooms, from the ground up: a room is a folder of `src/imbrex`, or a file of its root."""
KERNEL_FLOORS = tuple(
    frozenset(floor.split())
    for floor in ("ptx", "codec gate gemm peers", "routing ffn", "exchange", "rows events", "fused")
)
"""Families of kernels, Python and CUDA, from the ground up; files of `kernels` itself lie below all."""
MAX_ROOT_FILES = 8
LAYER_FLOOR = next(i for i, floor in enumerate(FLOORS) if "layer" in floor)
# Rooms that a training step runs through: a hidden synchronisation here costs every user.
HOT = frozenset().union(*FLOORS[: LAYER_FLOOR + 1]) - {
    *("cost", "placement", "contracts", "schedule", "simulate")
}

Breach = str


@functools.cache
def tree_of(text: str, path: str = "") -> ast.Module:
    """Parsed once for all the rules."""
    return ast.parse(text, path)


def room(module: str) -> str:
    """`imbrex.codec.zfp` -> `codec`; `imbrex` -> ``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def floor(name: str) -> int | None:
    """Number of the floor of a room, from the ground up; the public names stand right above the layer."""
    if name == "":
        return LAYER_FLOOR
    return next((i for i, rooms in enumerate(FLOORS) if name in rooms), None)


PACKAGES = frozenset({"imbrex", "benchmarks"})
"""The packages whose imports of themselves and of each other are checked."""


def module_of(path: str) -> str:
    """`src/imbrex/codec/zfp.py` -> `imbrex.codec.zfp`."""
    parts = PurePosixPath(path).with_suffix("").parts
    parts = parts[next(i for i, part in enumerate(parts) if part in PACKAGES) :]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(path: str) -> list[str]:
    """`src/imbrex/codec/zfp.py` and `src/imbrex/codec/__init__.py` -> imbrex, codec."""
    package = module_of(path).split(".")
    return package if path.endswith("__init__.py") else package[:-1]


def source_of(node: ast.ImportFrom, package: list[str]) -> str | None:
    """The absolute module that `from ... import` takes from, `None` where it is no part of ours."""
    base = package[: len(package) - node.level + 1] if node.level else []
    source = ".".join([*base, *([node.module] if node.module else [])])
    return source if source.split(".")[0] in PACKAGES else None


def imports(tree: ast.AST, path: str, modules: frozenset[str]) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import of `PACKAGES`, at the top of the file or inside a function.

    `from imbrex import plan` counts as `imbrex.exchange.plan` where that is one of `modules`.
    """
    package = package_of(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name.split(".")[0] in PACKAGES)
        elif isinstance(node, ast.ImportFrom) and (source := source_of(node, package)):
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield node.lineno, inner if inner in modules else source


def upward_imports(path: str, text: str, modules: frozenset[str]) -> list[Breach]:
    """Imports that do not point down the floors. The public `imbrex/__init__.py` may import every room."""
    here = room(module_of(path))
    if here == "" or path.endswith("imbrex/__main__.py"):
        return []
    at = floor(here)
    if at is None:
        return [f"{path}:1: room '{here}' stands on no floor: give it one in tests/house.py and design"]
    breaches = []
    for line, module in imports(tree_of(text, path), path, modules):
        there = room(module)
        below = floor(there)
        if there == here:
            continue
        if below is None or below >= at:
            breaches.append(f"{path}:{line}: '{here}' (floor {at}) imports {module} (floor {below})")
    return breaches


def crowded_root(paths: list[str]) -> list[Breach]:
    """Files beside the package's `__init__.py` beyond the few that a newcomer reads first."""
    root = [path for path in paths if PurePosixPath(path).parent.name == "imbrex"]
    return [f"src/imbrex: {len(root)} files, at most {MAX_ROOT_FILES}"] if len(root) > MAX_ROOT_FILES else []


def long_files(path: str, text: str) -> list[Breach]:
    lines = text.count("\n")
    return [f"{path}:1: {lines} lines, at most {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []


def wide_lines(path: str, text: str) -> list[Breach]:
    """Of kernels; ruff sees to Python's."""
    return [
        f"{path}:{number}: {len(line)} columns, at most {MAX_KERNEL_COLUMNS}"
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > MAX_KERNEL_COLUMNS
    ]


def long_functions(path: str, text: str) -> list[Breach]:
    """Functions whose body is over the limit; neither signature nor docstring is counted."""
    breaches = []
    for node in ast.walk(tree_of(text, path)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0]
        documented = ast.get_docstring(node) is not None
        begin = (first.end_lineno or first.lineno) + 1 if documented else first.lineno
        length = (node.end_lineno or node.lineno) - begin + 1
        if length > MAX_FUNCTION_LINES:
            breaches.append(f"{path}:{node.lineno}: {node.name} has {length} lines, at most 40")
    return breaches


def forbidden_names(path: str) -> list[Breach]:
    words = set(re.split(r"[_./]", PurePosixPath(path).with_suffix("").as_posix()))
    return [f"{path}:1: a file is named after its idea, not '{w}'" for w in sorted(words & FORBIDDEN_NAMES)]


def wide_contracts(path: str, text: str) -> list[Breach]:
    """Dataclasses that are not frozen, keyword-only and slotted, or have too many fields."""
    breaches = []
    for node in ast.walk(tree_of(text, path)):
        if not isinstance(node, ast.ClassDef) or "dataclass" not in "".join(
            map(ast.dump, node.decorator_list)
        ):
            continue
        call = next((d for d in node.decorator_list if isinstance(d, ast.Call)), None)
        given = {k.arg for k in call.keywords if getattr(k.value, "value", None) is True} if call else set()
        if missing := {"frozen", "kw_only", "slots"} - given:
            breaches.append(f"{path}:{node.lineno}: {node.name} is not {', '.join(sorted(missing))}")
        fields = sum(isinstance(s, ast.AnnAssign) for s in node.body)
        if fields > MAX_FIELDS:
            breaches.append(f"{path}:{node.lineno}: {node.name} has {fields} fields, at most {MAX_FIELDS}")
    return breaches


HAZARDS = (
    (
        r"\basm\b\s*(?:volatile|__volatile__)?\s*\(|inline_asm_elementwise",
        r"kernels/ptx/[^/]+\.cuh$",
        "assembly",
    ),
    (
        r"torch\.library|torch import library",
        r"/(exchange/(autograd|layer_op)|experts/products|router/(chosen|collectives)|kernels/.+)\.py$",
        "operator registration",
    ),
    (r"_symmetric_memory", r"/kernels/heap\.py$", "torch's symmetric memory"),
    (
        r"torch\.cuda\.(?:Stream|stream|Event|ExternalStream)\(",
        r"/(runtime/streams|observe/\w+|bench/.+)\.py$",
        "streams and events",
    ),
)
"""(what to look for, where it may stand, its name): one home per hazard."""


TWICE = (
    (r"\(ctypes\.Structure\)", r"/kernels/structs\.py$", "a struct of a kernel, which its source declares"),
    (r"struct\.pack\(", r"/kernels/arguments\.py$", "a struct of a kernel, packed by hand"),
)
"""What repeats a declaration of C++: `kernels.structs.struct` reads it (pattern, home, name)."""


def structs_written_twice(path: str, text: str) -> list[Breach]:
    """Structs of kernels written down a second time, in Python."""
    if "/kernels/" not in path:
        return []
    return [
        f"{path}:{number}: {name}: read it by kernels.structs"
        for pattern, home, name in TWICE
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(pattern, line) and not re.search(home, path)
    ]


def strayed_hazards(path: str, text: str) -> list[Breach]:
    found = []
    for pattern, home, name in HAZARDS:
        if re.search(home, path):
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if re.search(pattern, line.split("  #")[0]) and not line.lstrip().startswith(("#", "//")):
                found.append(f"{path}:{number}: {name} outside its home ({home})")
    return found


_TO_HOST_METHODS = {"item", "tolist", "cpu", "synchronize"}
"""Not `numpy`, which torch refuses for a tensor of a GPU."""
GIVES_HOST = {"exchange_counts", "words", "cpu", "tolist", "item", "numpy"}
"""Calls whose results are on the host: what ranks tell each other, and copies that have been made."""
ON_HOST = {
    *("splits_2W", "counts_WW", "counts_2SWW", "headers_WH", "hosts_W2", "split_WS", "loads_W"),
    *("_status", "_words", "_gathered", "iterations", "np"),
}
"""Names that stand for one thing everywhere, which is on the host: counts that ranks have exchanged, words in
memory that processes share or kernels write to, numbers of the balancer and what numpy makes."""


def _is_on_host(value: ast.AST, known: set[str]) -> bool:
    """Whether an expression is what the host has, by where it begins: `counts_WW.T[0]` is what `counts_WW`
    is, and `x[rank]` what `x` is."""
    if isinstance(value, ast.Name):
        return value.id in ON_HOST or value.id in known
    if isinstance(value, ast.Attribute):
        return value.attr in ON_HOST or _is_on_host(value.value, known)
    if isinstance(value, ast.Call):
        name = getattr(value.func, "attr", getattr(value.func, "id", ""))
        of = [value.func.value] if isinstance(value.func, ast.Attribute) else value.args
        return name in GIVES_HOST or any(_is_on_host(part, known) for part in of)
    if isinstance(value, ast.Subscript | ast.Starred):
        return _is_on_host(value.value, known)
    if isinstance(value, ast.Lambda | ast.ListComp | ast.GeneratorExp | ast.DictComp | ast.SetComp):
        return False
    return any(_is_on_host(part, known) for part in ast.iter_child_nodes(value))


def _host_names(function: ast.FunctionDef) -> set[str]:
    """Local names of a function that are assigned values of the host."""
    known: set[str] = set()
    for _ in range(3):  # of one another
        for node in ast.walk(function):
            pairs = []
            if isinstance(node, ast.Assign):
                pairs = [(target, node.value) for target in node.targets]
            elif isinstance(node, ast.For | ast.comprehension):
                pairs = [(node.target, node.iter)]
            for target, value in pairs:
                if _is_on_host(value, known):
                    known |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
    return known


def _copies_to_host(call: ast.Call, known: set[str]) -> bool:
    if not isinstance(call.func, ast.Attribute) or _is_on_host(call.func.value, known):
        return False
    if call.func.attr == "to":
        return any(isinstance(a, ast.Constant) and a.value == "cpu" for a in call.args)
    return call.func.attr in _TO_HOST_METHODS and not call.args


def silent_syncs(path: str, text: str) -> list[Breach]:
    """Copies to the host, in rooms that a step runs through, without `# host sync:` right above; not of what
    is there already (`GIVES_HOST`, `ON_HOST`), nor of constants of a module."""
    if room(module_of(path)) not in HOT:
        return []
    lines = text.splitlines()
    breaches = []
    functions = [n for n in ast.walk(tree_of(text, path)) if isinstance(n, ast.FunctionDef)]
    known: dict[ast.AST, set[str]] = {}
    for function in functions:
        names = _host_names(function)
        known |= {inner: names | known.get(inner, set()) for inner in ast.walk(function)}
    for statement, names in known.items():
        if not isinstance(statement, ast.stmt) or isinstance(statement, ast.FunctionDef | ast.ClassDef):
            continue
        head = [statement] if not hasattr(statement, "body") else list(_head(statement))
        calls = [n for part in head for n in ast.walk(part) if isinstance(n, ast.Call)]
        copies = any(_copies_to_host(call, names) for call in calls)
        if copies and not _has_reason(lines, statement):
            breaches.append(f"{path}:{statement.lineno}: a copy to the host without '# host sync:' above")
    return breaches


def _head(statement: ast.stmt) -> Iterator[ast.AST]:
    """The part of a compound statement before its body: what `if`, `for`, `with` and `while` evaluate."""
    for name, value in ast.iter_fields(statement):
        if name not in ("body", "orelse", "finalbody", "handlers"):
            yield from (v for v in (value if isinstance(value, list) else [value]) if isinstance(v, ast.AST))


def _has_reason(lines: list[str], statement: ast.stmt) -> bool:
    body = getattr(statement, "body", None)
    said = lines[statement.lineno - 1 : body[0].lineno - 1 if body else statement.end_lineno]
    if body:
        # A comment between the head and its body belongs to the body.
        said = [line for line in said if not line.lstrip().startswith("#")]
    above = statement.lineno - 2
    while above >= 0 and lines[above].lstrip().startswith("#"):
        said.append(lines[above])
        above -= 1
    return any(re.search(r"# host sync:", line) for line in said)


# By default torch decides their dtype from their values alone.
_INTEGERS_OF_THEMSELVES = {"arange", "randint", "randperm"}
_FACTORIES = _INTEGERS_OF_THEMSELVES | {
    *("empty", "empty_strided", "zeros", "ones", "full", "tensor", "as_tensor", "eye", "scalar_tensor"),
    *("linspace", "logspace", "rand", "randn", "normal"),
}
MAKES_OWN_PROCESS = {"cli", "bench", "demo", "reproduce", "launch"}
"""Rooms of programs, in which nobody but imbrex sets torch's defaults."""


def default_kinds(path: str, text: str) -> list[Breach]:
    """Tensors that get torch's default device, or a dtype that is not said: a user's
    `torch.set_default_dtype` or `torch.set_default_device` changes them."""
    if room(module_of(path)) in MAKES_OWN_PROCESS:
        return []
    breaches = []
    for node in ast.walk(tree_of(text, path)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, owner, said = node.func.attr, node.func.value, {keyword.arg for keyword in node.keywords}
        if not (isinstance(owner, ast.Name) and owner.id == "torch" and name in _FACTORIES) or None in said:
            continue
        floats = any(isinstance(n, ast.Constant) and isinstance(n.value, float) for n in ast.walk(node))
        wanted = {"device"} if name in _INTEGERS_OF_THEMSELVES and not floats else {"device", "dtype"}
        if missing := sorted(wanted - said):
            breaches.append(f"{path}:{node.lineno}: torch.{name} without {' and '.join(missing)}")
    return breaches


def banners(path: str, text: str) -> list[Breach]:
    return [
        f"{path}:{number}: a banner instead of a why"
        for number, line in enumerate(text.splitlines(), 1)
        if re.match(r"\s*(#|//)\s*[-=*#~/]{4,}", line)
    ]


HEADLESS = r"(Of|That|Those|As|In|What|Whose|And|None|The same)\b"
"""Beginnings that leave a docstring without its subject: it cannot be read alone."""
ADVERBS = (
    r"(For|By|Once|Inside|Between|Before|After|About|Per|Its|At|To|It|Their|With|Without|From|Not|Over|So|Under"
    r"|Behind)\b"
)
"""Beginnings that say what is special before they say what it is."""
BARE_VERBS = (
    r"([A-Z]\w+ed|Kept|Made|Held|Found|Sent|Taken|Given)"
    r"(?=[,:]\s| (when|where|for|in|over|beside|by|to|as)\b)"
)
"""Beginnings with a participle that belongs to no noun."""


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstrings of modules, classes, functions and assigned names."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for above, statement in zip([None, *body], body, strict=False):
            text = statement.value if isinstance(statement, ast.Expr) else None
            if not isinstance(text, ast.Constant) or not isinstance(text.value, str):
                continue
            if isinstance(above, ast.Assign | ast.AnnAssign) or (documented and above is None):
                yield statement.lineno, text.value


def headless_docstrings(path: str, text: str) -> list[Breach]:
    """Docstrings without a subject or a verb in front, or whose first paragraph ends in no full stop."""
    breaches = []
    for line, said in docstrings(tree_of(text, path)):
        headless = re.match(rf"\W*({HEADLESS}|{ADVERBS}|{BARE_VERBS})", said)
        paragraph = re.split(r"\n\s*\n", said.strip())[0]
        if headless:
            breaches.append(f"{path}:{line}: begins with '{headless[1]}'; say first what it is, or does")
        elif re.match(r"[a-z]\w*(, \w+)*: ", said.strip()):
            breaches.append(f"{path}:{line}: begins with a field; say first what the whole is")
        elif not paragraph.endswith((".", ":", "?", "!")):
            breaches.append(f"{path}:{line}: the first paragraph ends in no full stop")
    return breaches


def kernel_climbs(path: str, text: str) -> list[Breach]:
    """Includes and imports of one family of kernels by another that does not stand above it."""
    at = {family: number for number, floor in enumerate(KERNEL_FLOORS) for family in floor}
    own = path.removeprefix("src/imbrex/kernels/").split("/")[0]
    if not path.startswith("src/imbrex/kernels/") or "/" not in path.removeprefix("src/imbrex/kernels/"):
        return []
    pattern = r'#include "(\w+)/' if path.endswith((".cu", ".cuh")) else r"^from imbrex\.kernels\.(\w+)[. ]"
    breaches = [] if own in at else [f"{path}:1: the family {own} has no floor in KERNEL_FLOORS"]
    for match in re.finditer(pattern, text, re.MULTILINE):
        other, line = match[1], text.count("\n", 0, match.start()) + 1
        if other != own and at.get(other, -1) >= at.get(own, 0):
            breaches.append(f"{path}:{line}: {own} takes from {other}, which does not lie below it")
    return breaches


def loops_that_take_others(path: str, text: str) -> list[Breach]:
    """Loops in braces right under `if constexpr` or its `else`: where one is discarded, NVRTC 13.0 drops the
    unrolled loop behind it as well, and says nothing."""
    under = r"(?:if constexpr \([^\n]*\)|else)\s+(?:#pragma unroll[^\n]*\s+)?(?:for|while) \([^\n]*\) \{"
    return [
        f"{path}:{text.count(chr(10), 0, one.start()) + 1}: a loop to be discarded, without braces around"
        for one in re.finditer(under, text)
    ]


def fragments(files: dict[str, str], modules: frozenset[str]) -> list[Breach]:
    """Short files that a single other file imports: each is a part of that file."""
    importers: dict[str, set[str]] = {}
    for path, text in files.items():
        for _, module in imports(tree_of(text, path), path, modules):
            importers.setdefault(module, set()).add(path)
    return [
        f"{path}:1: {lines} lines, only for {next(iter(users))}"
        for path, text in files.items()
        if not path.endswith("__init__.py")
        and (lines := text.count("\n")) < MIN_FILE_LINES
        and len(users := importers.get(module_of(path), set())) == 1
    ]


PUBLIC_CONSTRUCTORS = ("layer.py", "exchange/exchange.py", "experts/experts.py", "transport/nvlink.py")


def many_parameters(path: str, text: str) -> list[Breach]:
    """Functions of more parameters than a reader keeps in mind. Other people's signatures are theirs
    (`adapters`), and every parameter of a public constructor is a decision of the user's."""
    if room(module_of(path)) == "adapters":
        return []
    public = {"__init__"} if path.endswith(PUBLIC_CONSTRUCTORS) else set()
    breaches = []
    for node in ast.walk(tree_of(text, path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len(set(names) - {"self", "cls", "ctx"})
            if count > MAX_PARAMETERS and node.name not in public:
                breaches.append(
                    f"{path}:{node.lineno}: {node.name} has {count} parameters, at most {MAX_PARAMETERS}"
                )
    return breaches


BARE = frozenset(
    {
        *("found", "given", "told", "made", "held", "kept", "wanted", "most", "one", "asked", "taken"),
        *("sent", "said", "shown"),
    }
)


NAMED = BARE & {"found", "given", "told", "made", "kept", "asked", "wanted", "taken", "most"}
"""Those that are refused as parameters, attributes and functions, too."""


def bare_participles(path: str, text: str) -> list[Breach]:
    """Variables named by a participle or pronoun alone, where a noun would say what they are."""
    breaches = []
    for node in ast.walk(tree_of(text, path)):
        name = ""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id if node.id in BARE else ""
        else:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                name = node.attr
            name = getattr(node, "arg" if isinstance(node, ast.arg) else "name", "") or name
            name = name if name.strip("_") in NAMED else ""
        if name:
            breaches.append(f"{path}:{getattr(node, 'lineno', 1)}: {name} is no noun")
    return breaches
