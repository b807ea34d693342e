"""Mutation check of the mathematics: every small change of a formula should fail a test.

    python tests/mutate.py                     # all modules; prints the score and the survivors
    python tests/mutate.py loss.py --jobs 2    # one module
    python tests/mutate.py --list              # the mutants, without running them

A mutant changes one operator, comparison, constant, keyword or name. Each runs in a process forked from one that has
torch loaded, against the tests that need no trainer. It is killed if a test fails or if it takes too long.

Survivors that change nothing that can be seen, or a bound that nothing depends on:
- grouping.py: `>` -> `>=` between numbers of groups that follow one another, which differ anyway; one place more at the
  end of a buffer; which place stands for one that a group of one does not have; `>` -> `>=` of the spread, since the
  deviations of equal values are 0.
- importance.py, `finite_exp`: its short way without a gradient, and a stand-in that is thrown away.
- normalization.py and advantages.py, `abs() <= resolution` -> `<`, which differ for a value of 0.
- advantages.py: the 16 of the resolution and one of its factors; stand-ins for NaN of rows that are masked later, and
  in the bound on rewards.
- loss.py: `detach` of what has no gradient; `advantages < 0` -> `<=`, where both arms are 0; placeholders that are
  thrown away (masked values, an empty batch); the private dataclass that is frozen.
- reductions.py, the 1 that nothing is divided by.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hf_grpo_ext"
MODULES = (
    "reductions.py",
    "grouping.py",
    "kl.py",
    "importance.py",
    "normalization.py",
    "advantages.py",
    "loss.py",
    "loss_config.py",
)
TESTS = (
    "test_kl_and_importance.py",
    "test_golden.py",
    "test_advantages.py",
    "test_loss.py",
    "test_cases.py",
    "test_rewards.py",
    "test_diagnostics.py",
    "test_reference.py",
)
SECONDS = 300

OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}  # fmt: skip
NAMES = {
    "amax": "amin", "amin": "amax", "maximum": "minimum", "minimum": "maximum", "max": "min", "min": "max",
    "all": "any", "any": "all", "zeros_like": "ones_like", "ones_like": "zeros_like", "exp": "expm1", "rsqrt": "sqrt",
    "detach": "clone", "square": "abs", "nansum": "nanmean",
}  # fmt: skip


def mutants(tree: ast.Module) -> Iterator[tuple[int, str, ast.Module]]:
    """Line, description and tree of each mutant. Docstrings, annotations and error messages are left alone."""
    skipped = {id(n) for node in ast.walk(tree) if _is_prose(node) for n in ast.walk(node)}
    returns = [node.returns for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.returns]
    skipped |= {id(n) for node in returns for n in ast.walk(node)}
    nodes = [node for node in ast.walk(tree) if id(node) not in skipped]
    places = {id(node): index for index, node in enumerate(ast.walk(tree))}
    for node in nodes:
        for what, change in _changes(node):
            twin = copy.deepcopy(tree)
            target = list(ast.walk(twin))[places[id(node)]]
            change(target)
            yield getattr(node, "lineno", 0), what, ast.fix_missing_locations(twin)


def _is_prose(node: ast.AST) -> bool:
    """What says nothing, or the same: prose, types, and the last dimension, which is -1 or 1 of a matrix alike."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return isinstance(node.operand, ast.Constant) and node.operand.value == 1
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if isinstance(node, ast.keyword):
        return node.arg in ("strict", "stable")
    return docstring or isinstance(node, (ast.Raise, ast.arg, ast.AnnAssign, ast.Import, ast.ImportFrom))


def _changes(node: ast.AST) -> Iterator:
    def setter(field, value):
        return lambda target: setattr(target, field, value)

    if isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in OPERATORS:
        new = OPERATORS[type(node.op)]
        yield f"{type(node.op).__name__} -> {new.__name__}", setter("op", new())
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
        new = OPERATORS[type(node.ops[0])]
        yield f"{type(node.ops[0]).__name__} -> {new.__name__}", setter("ops", [new(), *node.ops[1:]])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Invert, ast.Not)):
        name = type(node.op).__name__
        if isinstance(node.op, ast.USub):
            yield f"drop {name}", setter("op", ast.UAdd())
        elif isinstance(node.op, ast.Not):
            yield f"drop {name}", lambda t: setattr(t, "operand", ast.UnaryOp(ast.Not(), copy.deepcopy(t.operand)))
        else:
            yield f"drop {name}", lambda t: setattr(t, "operand", ast.UnaryOp(ast.Invert(), copy.deepcopy(t.operand)))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} -> {not node.value}", setter("value", not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield f"{node.value} -> {node.value + 1}", setter("value", node.value + 1)
    elif isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield f".{node.attr} -> .{NAMES[node.attr]}", setter("attr", NAMES[node.attr])
    elif isinstance(node, ast.Name) and node.id in NAMES:
        yield f"{node.id} -> {NAMES[node.id]}", setter("id", NAMES[node.id])
    elif isinstance(node, ast.IfExp):
        yield "swap the arms", lambda t: t.__dict__.update(body=t.orelse, orelse=t.body)
    elif isinstance(node, ast.If):
        yield "never", setter("test", ast.Constant(False))


class _Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves the mutant in the place of one module."""

    def __init__(self, name: str, tree: ast.Module) -> None:
        self.name, self.tree = name, tree

    def find_spec(self, fullname, path=None, target=None):
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.name else None

    def exec_module(self, module):
        exec(compile(self.tree, self.name, "exec"), module.__dict__)


def survives(module: str, tree: ast.Module) -> bool:
    """Whether all tests pass with the mutant, in a child process."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        sys.meta_path.insert(0, _Loader(f"hf_grpo_ext.{module.removesuffix('.py')}", tree))
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:doctest", "-o", "addopts=", "-m", "not slow"]
        try:
            code = pytest.main([*options, *(str(ROOT / "tests" / name) for name in TESTS)])
        except BaseException:  # whatever happens, the mutant did not pass
            code = 1
        os._exit(int(code) != 0)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def run(work: list[tuple[str, int, str, ast.Module]], job: int, jobs: int, out: int) -> None:
    for module, line, what, tree in work[job::jobs]:
        verdict = "survived" if survives(module, tree) else "killed"
        os.write(out, f"{verdict}\t{module}:{line}\t{what}\n".encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=MODULES)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--every", type=int, default=1, help="run one of so many mutants")
    parser.add_argument("--offset", type=int, default=0, help="leave out so many at the start")
    args = parser.parse_args()
    work = [
        (module, line, what, tree)
        for module in args.modules
        for line, what, tree in mutants(ast.parse((PACKAGE / module).read_text()))
    ][args.offset :: args.every]
    if args.list:
        for module, line, what, _ in work:
            print(f"{module}:{line}\t{what}")
        print(f"{len(work)} mutants")
        return

    import hypothesis  # noqa: F401  # loaded once, before the forks
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch
    from trl import GRPOConfig, GRPOTrainer  # noqa: F401

    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT / "tests"))
    read, write = os.pipe()
    for job in range(args.jobs):
        if os.fork() == 0:
            run(work, job, args.jobs, write)
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as lines:
        results = []
        for line in lines:
            results.append(line.rstrip("\n").split("\t"))
            if results[-1][0] == "survived":
                print("survived", *results[-1][1:], flush=True)
    killed = sum(result[0] == "killed" for result in results)
    print(f"{killed} of {len(results)} mutants killed: {100 * killed / max(1, len(results)):.1f}%")
    if len(results) != len(work):
        raise SystemExit(f"only {len(results)} of {len(work)} mutants came back")


if __name__ == "__main__":
    main()
