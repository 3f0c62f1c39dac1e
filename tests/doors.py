"""The house rules about who may know what of whom: private names, contracts, circles, doors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from tests.house import Breach, imports, module_of, package_of, room, source_of, tree_of

OTHER_PEOPLES = {"super", "torch", "os", "dist", "driver", "DistributedDataParallel", "mesh"}
"""Modules and objects of others that have no public door."""
THEIR_NAMES = {
    *("_replace", "_fields"),  # public in a named tuple
    *("_parameters", "_modules", "_buffers", "_version", "_clip_grads_with_norm_", "_module_info"),  # torch
    "_default_apply_gate",  # transformers
}


def private_reaches(path: str, text: str) -> list[Breach]:
    """`other._name` where this file does not define `_name`: another room's secret."""
    tree = tree_of(text, path)
    own = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    own |= {
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute)
        and isinstance(n.ctx, ast.Store)
        and isinstance(n.value, ast.Name)
        and n.value.id == "self"
    }
    own |= {
        n.target.id for n in ast.walk(tree) if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    breaches = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not re.match(r"_[a-z]", node.attr):
            continue
        root: ast.AST = node.value
        while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
            root = root.func if isinstance(root, ast.Call) else root.value
        name = root.id if isinstance(root, ast.Name) else ""
        mine = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if mine or name in OTHER_PEOPLES | {"super"} or node.attr in own | THEIR_NAMES:
            continue
        breaches.append(f"{path}:{node.lineno}: reaches into {ast.unparse(node)}")
    return breaches


CONTRACTS = ("transport", "experts", "strategy", "codec", "exchange", "wire", "dispatcher")
WAYS = r".*(Nvlink|Tiers|Transport|Dispatcher|Hierarchical|AllToAll|AllReduce|AllGather|TwoLevel|Fused)$"
MAY_ASK = (
    "exchange/exchange.py",  # `dispatcher_of`, which chooses the dispatcher
    "exchange/bytes.py",  # for a group to look at, which a transport of the user's need not have
    "adapters/deep_ep/opening.py",  # chooses the backend
    "overlap/auto.py",  # times a strategy that fuses as a graph does
)


def probes(path: str, text: str) -> list[Breach]:
    """`hasattr` and `getattr` on what a contract describes: the contract says whether it is there."""
    breaches = []
    for node in ast.walk(tree_of(text, path)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("hasattr", "getattr")
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
            and ast.unparse(node.args[0]).split(".")[-1] in CONTRACTS
        ):
            breaches.append(f"{path}:{node.lineno}: asks a contract: {ast.unparse(node)}")
    return breaches


def asked_ways(path: str, text: str) -> list[Breach]:
    """`isinstance` of a backend, dispatcher or strategy outside the few places that choose one: elsewhere the
    contract answers."""
    if path.endswith(MAY_ASK):
        return []
    breaches = []
    for node in ast.walk(tree_of(text, path)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            kinds = re.findall(r"\w+", ast.unparse(node.args[1]))
            if any(re.match(WAYS, kind) for kind in kinds):
                breaches.append(f"{path}:{node.lineno}: asks which way it is: {ast.unparse(node)}")
    return breaches


def circles(files: dict[str, str], modules: frozenset[str]) -> list[Breach]:
    """Files that import each other, straight or through others; in functions and for type checkers, too."""
    below: dict[str, set[str]] = {}
    for path, text in files.items():
        sources = {module for _, module in imports(tree_of(text, path), path, modules)}
        below[module_of(path)] = sources - {module_of(path)}
    breaches = []
    for start in below:
        reached, ahead = set(), list(below[start])
        while ahead:
            module = ahead.pop()
            if module not in reached:
                reached.add(module)
                ahead.extend(below.get(module, ()))
        if start in reached:
            breaches.append(f"{start}: imports itself through others")
    return breaches


def imported_commands(path: str, text: str) -> list[Breach]:
    """Imports of `imbrex.cli` in a benchmark: what measures stands in `bench`."""
    taken = [
        (node.lineno, name)
        for node in ast.walk(tree_of(text, path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (f"{getattr(node, 'module', '')}.{alias.name}" for alias in node.names)
    ]
    return [f"{path}:{line}: imports {name}" for line, name in taken if "imbrex.cli" in name]


def public_names(text: str) -> frozenset[str]:
    """The names of a module's `__all__`."""
    for node in tree_of(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


def doors_of(files: dict[str, str]) -> dict[str, frozenset[str]]:
    """What others may import, by module: the `__all__` of a room or of a family of kernels and, where a
    module stands in that, the module's own."""
    rooms = [p for p in files if p.endswith("__init__.py") or PurePosixPath(p).parent.name == "imbrex"]
    doors = {module_of(path): public_names(files[path]) for path in rooms}
    inner = {f"{module}.{name}" for module, names in doors.items() for name in names}
    return doors | {m: public_names(text) for p, text in files.items() if (m := module_of(p)) in inner}


def takings(tree: ast.AST, package: list[str], modules: frozenset[str]) -> Iterator[tuple[int, str, str]]:
    """(line, module, name) of what a file takes of this package: `from module import name`, and `m.name`
    where `m` is one of `modules` that it imports."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                module, _, name = alias.name.rpartition(".")
                root = alias.name.split(".")[0]
                known[alias.asname or root] = alias.name if alias.asname else root
                if module.split(".")[0] == "imbrex":
                    yield node.lineno, module, name
        elif isinstance(node, ast.ImportFrom) and (source := source_of(node, package)):
            for alias in node.names:
                known[alias.asname or alias.name] = f"{source}.{alias.name}"
                yield node.lineno, source, alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = known.get(node.value.id)
            if module in modules:
                yield node.lineno, module, node.attr


def private_doors(
    path: str, text: str, doors: dict[str, frozenset[str]], modules: frozenset[str]
) -> list[Breach]:
    """What an adapter, ours or a user's, takes of imbrex that is not public; all contracts are."""
    if room(module_of(path)) != "adapters":
        return []
    return [
        f"{path}:{line}: an adapter takes {module}.{name}, which is in the __all__ of no room"
        for line, module, name in takings(tree_of(text, path), package_of(path), modules)
        if room(module) not in ("adapters", "contracts")
        and f"{module}.{name}" not in doors
        and name not in {"__version__", *doors.get(module, ())}
    ]
