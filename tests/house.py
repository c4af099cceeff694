"""The house in figures: folders, names, comments, types and signatures of the source, counted from its syntax trees.

    python -m tests.house            # a table, with the limits that tests/test_house.py holds
    python -m tests.house /other/checkout

Counted are the four folders that are installed (parity, model, probes, reports), each file once; links are not
followed.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FOLDERS = ("parity", "model", "probes", "reports")
Function = ast.FunctionDef | ast.AsyncFunctionDef

IRREGULAR = frozenset(
    "begun bound built cut drawn fed found given gone held hidden kept known laid left lent lost made met paid "
    "put read run said seen sent set shown shut sought spent split spoken stood taken taught thought told "
    "written".split()
)
"""Past participles that do not end in -ed."""
BASE_FORMS = frozenset({"run", "put", "feed", "embed", "set", "cut", "shed", "speed", "need", "seed", "read"})
"""Words of the two shapes above that are verbs in their base form too: `run(...)` and `embed(...)` do something."""
BY_TABLE = frozenset({"paint"})
"""Names that a table calls in several modules on purpose; commands of the command line likewise."""


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str
    """Its import name: `parity.model.drafting.decode`."""
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text)

    @cached_property
    def functions(self) -> list[Function]:
        """Every function and method, nested ones included."""
        return [node for node in ast.walk(self.tree) if isinstance(node, Function)]

    @cached_property
    def comments(self) -> set[int]:
        """Numbers of the lines with a comment; directives to tools are none."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        directive = re.compile(r"#\s*(noqa|type:|pragma|fmt:)")
        return {t.start[0] for t in tokens if t.type == tokenize.COMMENT and not directive.match(t.string)}

    @property
    def public_names(self) -> Iterator[str]:
        """Public names that the module defines at its top level: functions, classes, constants and types."""
        for node in self.tree.body:
            if isinstance(node, Function | ast.ClassDef):
                names = [node.name]
            elif isinstance(node, ast.Assign):
                names = [each.id for each in node.targets if isinstance(each, ast.Name)]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names = [node.target.id]
            else:
                continue
            yield from (name for name in names if not name.startswith("_"))

    @property
    def imports(self) -> Iterator[str]:
        """Import names of what it imports, also inside functions and for type checkers alone."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                yield from (f"{node.module}.{each.name}" for each in node.names)
                yield node.module
            elif isinstance(node, ast.Import):
                yield from (each.name for each in node.names)


def read_modules(root: Path) -> list[Module]:
    """The source files below `root`, in order of their names."""
    found = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if any(link.is_symlink() for link in path.parents if root in link.parents):
                continue
            name = ".".join(("parity", *parts) if folder != "parity" else parts).removesuffix(".__init__")
            found.append(Module(name, path, path.read_text(encoding="utf-8")))
    return found


def is_bare_participle(name: str) -> bool:
    """Whether a function is named by one past participle and nothing else (`compared`, `_told`)."""
    word = name.strip("_")
    if "_" in word or word in BASE_FORMS:
        return False
    return word in IRREGULAR or bool(re.fullmatch(r"[a-z]{2,}ed", word))


def colliding_names(modules: list[Module]) -> dict[str, list[str]]:
    """Public names that more than one module defines -> those modules."""
    where = defaultdict(list)
    for module in modules:
        for name in dict.fromkeys(module.public_names):
            is_command = module.name.startswith("parity.cli.") and name == module.name.rpartition(".")[2]
            if not is_command and name not in BY_TABLE:
                where[name].append(module.name)
    return {name: names for name, names in sorted(where.items()) if len(names) > 1}


def import_cycles(modules: list[Module]) -> list[tuple[str, ...]]:
    """Groups of modules that import each other, directly or not (Tarjan's strongly connected components)."""
    known = {module.name for module in modules}
    graph = {m.name: {each for each in m.imports if each in known and each != m.name} for m in modules}
    # A package's __init__ names its parts for type checkers and imports nothing when it runs.
    graph |= {module.name: set() for module in modules if module.path.name == "__init__.py"}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[tuple[str, ...]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(tuple(sorted(group)))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return found


def long_functions_without_comment(modules: list[Module], lines: int = 30) -> tuple[list[str], int]:
    """Functions of at least `lines` lines that have no comment inside, and how many have that length."""
    bare, count = [], 0
    for module in modules:
        for node in module.functions:
            end = node.end_lineno or node.lineno
            if end - node.lineno + 1 >= lines:
                count += 1
                if not any(node.lineno <= line <= end for line in module.comments):
                    bare.append(f"{module.name}:{node.lineno} {node.name}")
    return bare, count


def long_signatures(modules: list[Module], most: int = 10) -> list[str]:
    """Functions with more than `most` parameters; a command of typer is its options and is left out."""
    found = []
    for module in modules:
        if module.name.startswith("parity.cli."):
            continue
        for node in module.functions:
            a = node.args
            names = [each.arg for each in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
            if len([name for name in names if name not in ("self", "cls")]) > most:
                found.append(f"{module.name}:{node.lineno} {node.name}")
    return found


def code_lines(module: Module) -> int:
    """Lines that are neither blank nor comment nor docstring (a field's docstring included)."""
    docs: set[int] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                docs |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = module.text.splitlines()
    return sum(
        1
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.strip().startswith("#") and number not in docs
    )


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    name: str
    value: float
    limit: float
    detail: tuple[str, ...] = ()
    """What is counted, for those who have to mend it."""


CODE_LINES_BEFORE = 31_169
"""Code lines of the same four folders at commit 6e66eea, before the rooms were made."""


def measure(root: Path) -> list[Figure]:
    """All figures of a checkout."""
    modules = read_modules(root)
    functions = [node for module in modules for node in module.functions]
    folders = Counter(
        m.path.parent.relative_to(root).as_posix() for m in modules if m.path.stem != "__init__"
    )
    names = [name for module in modules for name in dict.fromkeys(module.public_names)]
    collisions = colliding_names(modules)
    participles = [f"{m.name} {n.name}" for m in modules for n in m.functions if is_bare_participle(n.name)]
    bare, long = long_functions_without_comment(modules)
    lines = sum(len(module.text.splitlines()) for module in modules)
    anys = sum(
        len(re.findall(r"\bAny\b", line))
        for m in modules
        for line in m.text.splitlines()
        if "import" not in line
    )
    signatures = long_signatures(modules)
    return [
        Figure(
            "most modules in a folder",
            max(folders.values()),
            15,
            tuple(f"{n} {f}" for f, n in folders.most_common()),
        ),
        Figure("import cycles", len(import_cycles(modules)), 0, tuple(map(" ".join, import_cycles(modules)))),
        Figure(
            "public names defined twice, %",
            100 * sum(map(len, collisions.values())) / len(names),
            5,
            tuple(f"{name}: {', '.join(where)}" for name, where in collisions.items()),
        ),
        Figure(
            "bare participles per 1,000 functions",
            1000 * len(participles) / len(functions),
            12,
            tuple(participles),
        ),
        Figure(
            "functions of 30+ lines without a comment, %", 100 * len(bare) / max(1, long), 20, tuple(bare)
        ),
        Figure("`Any` per 1,000 lines", 1000 * anys / lines, 8),
        Figure("signatures above 10 parameters", len(signatures), 0, tuple(signatures)),
        Figure("code lines", sum(map(code_lines, modules)), 0.95 * CODE_LINES_BEFORE),
        Figure("modules", len(modules), float("inf")),
        Figure("functions", len(functions), float("inf")),
    ]


def main() -> None:
    """Print the table; `-v` lists what is counted."""
    arguments = [each for each in sys.argv[1:] if each != "-v"]
    for figure in measure(Path(arguments[0] if arguments else ".").resolve()):
        print(f"{figure.name:45} {figure.value:9.1f}   at most {figure.limit:g}")
        for line in figure.detail if "-v" in sys.argv else ():
            print(f"    {line}")


if __name__ == "__main__":
    main()
