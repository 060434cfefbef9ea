"""Runs inside the sandbox: reads the test code of a label, before any program meets it.

What no program could pass or fail is found here and is an error of the label: tests that check nothing, tests that
need what the program cannot show. What is left is rewritten so that it counts the checks that it makes, because a test
that made none says nothing.
"""

import ast
import builtins
import sys
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any, NamedTuple

COUNT = "__count_check__"
"""The name of the function that test code calls with the outcome of each check; returns what it is given."""

PROGRAM_MODULE = "solution"
"""What test code calls the program where it imports from it, as in KodCode."""

RUNNERS = {"unittest.main", "pytest.main"}
RAISING = ("raises", "assertRaises", "assertRaisesRegex")
BROAD = ("AssertionError", "Exception", "BaseException")
OWN_MODULES = {PROGRAM_MODULE, *sys.stdlib_module_names}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Pass)


class LabelError(Exception):
    """The tests themselves cannot be run."""


class Piece(NamedTuple):
    """A piece of test code, and the names of the test functions and classes that it defines, to be run after it."""

    code: CodeType
    tests: list[str]


class Names(NamedTuple):
    """The names in test code: those that only the program can define, and those that it calls by their bare name."""

    of_program: set[str]
    called: set[str]


def read_pieces(texts: list[str], *, check: bool) -> tuple[list[Piece], Names]:
    """Compile a set-up and pieces of test code. With `check` the last one defines a function that makes the checks.

    Raises LabelError for what is not Python, makes no check, or needs what the program cannot show.
    """
    trees = [_parse(text) for text in texts]
    names = find_names(trees)
    for tree in trees:
        _refuse_what_cannot_be_tested(tree, names.of_program)
    pieces = []
    for number, (text, tree) in enumerate(zip(texts, trees, strict=True)):
        tests = [name for name in map(_test_name, tree.body) if name is not None]
        if number > 0:
            if not any(map(_is_check, (*ast.walk(trees[0]), *ast.walk(tree)))):
                raise LabelError(f"the test {text[:80]!r} checks nothing: it has no assert statement that can fail")
            if not check and not tests and all(map(_only_defines, tree.body)):
                raise LabelError(f"the test {text[:80]!r} only defines what nothing calls; a function check needs an "
                                 "entry_point")  # fmt: skip
        counting = ast.fix_missing_locations(_Counting().visit(tree))
        pieces.append(Piece(_compile(text, counting), tests))
    return pieces, names


def names_under_test(names: Names) -> set[str]:
    """The names that mean the program's functions even where Python has something of that name.

    They are those that are called, but for built-in functions. Only where tests use no other name of the program a
    built-in one is meant: a program that is to define `sum` is tested by calling `sum`. Raises LabelError if it is not
    clear which.
    """
    called = {name for name in names.called if not hasattr(builtins, name)}
    if called or names.of_program:
        return called
    functions = {name for name in names.called if not isinstance(getattr(builtins, name), type)} or names.called
    if len(functions) > 1:
        raise LabelError(f"it is not clear which of {', '.join(sorted(functions))} is to be tested; give a function "
                         "check and an entry_point")  # fmt: skip
    return functions


def find_names(trees: list[ast.Module]) -> Names:
    """Sort the names in test code."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    defined = set(_defined(nodes))
    loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if PROGRAM_MODULE in (getattr(node, "module", None), alias.name)
    }
    unknown = {name for name in loaded - defined if not hasattr(builtins, name) and not name.startswith("__")}
    return Names((unknown - sys.stdlib_module_names) | imported, called - defined)


def _defined(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """What test code gives a meaning itself."""
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler):
            yield node.name or ""
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)


def run_tests(names: dict[str, Any], tests: list[str]) -> None:
    """Run test functions, test cases of unittest, and classes of test functions. Raises what they raise."""
    for name in tests:
        test = names[name]
        if not isinstance(test, type):
            test()
        elif hasattr(test, "debug"):  # a TestCase
            from unittest import defaultTestLoader

            defaultTestLoader.loadTestsFromTestCase(test).debug()
        else:
            for method in vars(test):
                if method.startswith("test"):
                    getattr(test(), method)()


def _parse(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise LabelError(f"the test {text[:80]!r} is not Python: {error}") from error


def _compile(text: str, tree: ast.Module) -> CodeType:
    try:
        return compile(tree, "test", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # such as a return outside of a function
        raise LabelError(f"the test {text[:80]!r} is not Python: {error}") from error


def _test_name(node: ast.stmt) -> str | None:
    """The name of a definition that pytest or unittest would find and run, None for any other statement."""
    if isinstance(node, ast.ClassDef):
        bases = {_name(base).rpartition(".")[2] for base in node.bases}
        return node.name if "TestCase" in bases or (node.name.startswith("Test") and not bases) else None
    if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test"):
        return None
    arguments = node.args
    needed = len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
    return node.name if needed == 0 and all(arguments.kw_defaults) else None


def _only_defines(node: ast.stmt) -> bool:
    """Whether a statement has no effect but to give names a meaning."""
    if isinstance(node, ast.If):
        return all(map(_only_defines, (*node.body, *node.orelse)))
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or _is_runner(node.value)
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return not any(isinstance(inner, ast.Call) for inner in ast.walk(node))
    return isinstance(node, DEFINITIONS)


def _is_check(node: ast.AST) -> bool:
    """Whether a node can find a program wrong: an assert, `if ...: raise`, an assertion of unittest, `raises`."""
    if isinstance(node, ast.Assert):
        return not isinstance(node.test, ast.Constant)
    if isinstance(node, ast.If):
        return any(isinstance(statement, ast.Raise) for statement in node.body)
    if isinstance(node, ast.Call):
        name = _name(node.func).rpartition(".")[2]
        return name.startswith("assert") or name in RAISING
    return _expects_exception(node)


def _expects_exception(node: ast.AST) -> bool:
    """Whether it is `try: f(); assert False; except ...`, which passes without reaching an assert."""
    return isinstance(node, ast.Try) and (_asserts(node.body) or _asserts(node.orelse))


def _swallows_assertion(node: ast.AST) -> bool:
    """Whether an assert that fails has no consequence, because it is caught and nothing is done about it."""
    return (
        isinstance(node, ast.Try)
        and _asserts(node.body)
        and any(
            (handler.type is None or any(_name(inner) in BROAD for inner in ast.walk(handler.type)))
            and all(isinstance(statement, ast.Pass | ast.Expr) for statement in handler.body)
            for handler in node.handlers
        )
    )


def _asserts(statements: list[ast.stmt]) -> bool:
    return any(isinstance(inner, ast.Assert) for statement in statements for inner in ast.walk(statement))


def _is_runner(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _name(node.func) in RUNNERS


def _name(node: ast.AST | None) -> str:
    """A name with dots, as it is written; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{_name(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


class _Counting(ast.NodeTransformer):
    """Has test code count its checks, and leaves out the runners: what they would run is run anyway."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.test, ast.Constant):
            node.test = _counted(node.test)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        is_check = _is_check(node)
        self.generic_visit(node)
        if is_check:
            node.test = _counted(node.test)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        is_check = _is_check(node)
        self.generic_visit(node)
        return _counted(node) if is_check else node

    def visit_Try(self, node: ast.Try) -> ast.AST:
        expects_exception = _expects_exception(node)
        self.generic_visit(node)
        for handler in node.handlers if expects_exception else ():
            handler.body.insert(0, ast.Expr(_counted(ast.Constant(value=True))))
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return ast.Pass() if _is_runner(node.value) else self.generic_visit(node)


def _counted(outcome: ast.expr) -> ast.Call:
    return ast.Call(func=ast.Name(id=COUNT, ctx=ast.Load()), args=[outcome], keywords=[])


def _refuse_what_cannot_be_tested(tree: ast.Module, of_program: set[str]) -> None:
    """Raise LabelError for asserts that cannot fail, modules that are not there, and types of the program.

    An object of the program stays in its process: in the tests it is an instance of nothing, and what it raises is one
    of Python's own exceptions or none that has a name.
    """
    for node in ast.walk(tree):
        problem = _problem(node, of_program)
        if problem is not None:
            raise LabelError(f"a test {problem}: {ast.unparse(node)[:80]!r}")


def _problem(node: ast.AST, of_program: set[str]) -> str | None:
    """What is wrong with a node of test code, None where nothing is."""
    if isinstance(node, ast.Assert):
        is_text = isinstance(node.test, ast.Constant) and isinstance(node.test.value, str) and node.test.value
        is_tuple = isinstance(node.test, ast.Tuple) and node.test.elts
        return "asserts a text or a tuple, which is always true" if is_text or is_tuple else None
    if isinstance(node, ast.Import):
        missing = [alias.name for alias in node.names if alias.name.partition(".")[0] not in OWN_MODULES]
        return f"imports {missing[0]}, which programs do not have" if missing else None
    if isinstance(node, ast.ImportFrom):
        module = (node.module or "").partition(".")[0]
        return None if module in OWN_MODULES else f"imports {module}, which programs do not have"
    if isinstance(node, ast.Await | ast.AsyncFunctionDef) or (
        isinstance(node, ast.Call) and _name(node.func) == "asyncio.run"
    ):
        return "awaits, but coroutines stay in the program's process"
    if _swallows_assertion(node):
        return "catches its own assertion, so that it cannot fail"
    types = _types(node)
    if types is not None and any(_name(inner) in of_program for inner in ast.walk(types)):
        return "needs a type of the program, which stays in its process"
    return None


def _types(node: ast.AST) -> ast.AST | None:
    """The type, or tuple of types, that a value or an exception is held against."""
    if isinstance(node, ast.ExceptHandler):
        return node.type
    if isinstance(node, ast.Call):
        name = _name(node.func).rpartition(".")[2]
        if name in ("isinstance", "issubclass", "assertIsInstance") and len(node.args) > 1:
            return node.args[1]
        if name in RAISING and node.args:
            return node.args[0]
    return None
