"""docs/architecture.md, held against the code and against a traced recurrence."""

from __future__ import annotations

import ast
import re
import sys
import threading
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import pytest
import yaml
from rich.console import Console

from tests.training_functions import write_job
from zeus_flows.core import policy
from zeus_flows.core.records import EnergySource
from zeus_flows.job_file import load_job
from zeus_flows.ledger.open_ledger import open_direct
from zeus_flows.orchestration.recurrence_flow import recurrence
from zeus_flows.reporting.console import RunView

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "zeus_flows"
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
WALK = re.findall(r"^\| `(zeus_flows/[\w/]+\.py)` \| `([\w.]+)` \|", PAGE, re.MULTILINE)
MODULES = sorted(PACKAGE.rglob("*.py"))

#: A class with more fields than this is several.
MOST_FIELDS = 15
#: What is written down whole, field by field: what a user writes, what MLflow keeps, what a decision is taken on.
RECORDS = {"JobFile", "Job", "Decision", "Observation", "State"}

Call = tuple[str, str]


@cache
def tree_of(path: Path) -> ast.Module:
    """Return a file, parsed once."""
    return ast.parse(path.read_text(encoding="utf-8"))


def classes_of(path: Path) -> list[ast.ClassDef]:
    """Return every class of a file."""
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)]


def functions_of(path: Path) -> Iterator[tuple[str, int]]:
    """Yield every function of a file by its qualified name, with the line it begins in."""

    def inside(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, int]]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + node.name, min([node.lineno, *(d.lineno for d in node.decorator_list)])
            elif isinstance(node, ast.ClassDef):
                yield from inside(node.body, f"{prefix}{node.name}.")

    yield from inside(tree_of(path).body, "")


@contextmanager
def traced(calls: list[Call]) -> Iterator[None]:
    """Note every call of a function of the walk, in whichever thread it happens."""
    wanted = {
        (str(ROOT / file), line): (file, name)
        for file, function in set(WALK)
        for name, line in functions_of(ROOT / file)
        if name == function
    }
    known: dict[CodeType, Call | None] = {}

    def profile(frame: FrameType, event: str, _arg: object) -> None:
        if event == "call":
            code = frame.f_code
            if code not in known:
                known[code] = wanted.get((code.co_filename, code.co_firstlineno))
            if (call := known[code]) is not None:
                calls.append(call)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def test_the_walk_names_functions_that_exist() -> None:
    assert len(WALK) > 20
    for file, function in WALK:
        assert function in dict(functions_of(ROOT / file)), f"{file} has no {function}"


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_a_traced_recurrence_goes_the_way_of_the_walk(tmp_path: Path, sqlite_uri: str) -> None:
    path = write_job(tmp_path / "job.yaml")
    recurrence(str(path), tracking_uri=sqlite_uri)  # the walk is that of a job that ran before
    calls: list[Call] = []
    with traced(calls):
        done = recurrence(str(path), tracking_uri=sqlite_uri)
        job_file = load_job(path)
        job = job_file.core(EnergySource.SIMULATED)
        ledger = open_direct(
            job, tracking_uri=sqlite_uri, energy_source=EnergySource.SIMULATED, comparable=job_file.comparable
        )
        view = RunView(Console(quiet=True), job, total=1, energy_source=EnergySource.SIMULATED)
        view.summary(policy.saved(job, ledger.state()))
    assert done.converged
    left = iter(calls)
    for step in WALK:
        assert step in left, f"{' '.join(step)} was not called, or not in the order of the walk"


def test_every_path_on_the_page_exists() -> None:
    named = set(re.findall(r"`([\w./-]+/[\w./-]*)`", PAGE))
    assert len(named) > 30
    for path in named:
        assert (ROOT / path).exists() or (PACKAGE / path).exists(), path


def test_every_room_is_on_the_page() -> None:
    rooms = {f"zeus_flows/{path.parent.relative_to(PACKAGE)}/" for path in PACKAGE.glob("*/__init__.py")}
    assert not [room for room in rooms if f"`{room}`" not in PAGE]


def test_the_page_has_the_layers_that_the_linter_holds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = [c["layers"] for c in project["tool"]["importlinter"]["contracts"] if c["type"] == "layers"]
    drawn = PAGE.partition("## Who may import whom")[2].partition("```text\n")[2].partition("```")[0]
    assert drawn.split("\n")[:-1] == [layer.replace("zeus_flows.", "") for layer in layers]


def repeated(names: Callable[[Path], list[str]]) -> dict[str, list[str]]:
    """Return the names that several modules have."""
    homes = defaultdict(list)
    for module in MODULES:
        for name in names(module):
            homes[name].append(str(module.relative_to(ROOT)))
    return {name: places for name, places in homes.items() if len(places) > 1}


def test_a_class_name_is_used_once() -> None:
    assert repeated(lambda module: [node.name for node in classes_of(module)]) == {}


def fields_of(node: ast.ClassDef) -> set[str]:
    """Return the names of a class's instance attributes: those declared in its body, and those a method sets."""
    declared = {
        s.target.id
        for s in node.body
        if isinstance(s, ast.AnnAssign)
        and isinstance(s.target, ast.Name)
        and "ClassVar" not in ast.unparse(s.annotation)
    }
    return declared | {
        n.attr
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute)
        and isinstance(n.ctx, ast.Store)
        and isinstance(n.value, ast.Name)
        and n.value.id == "self"
    }


def test_a_class_has_few_fields_unless_it_is_a_record() -> None:
    classes = [node for module in MODULES for node in classes_of(module)]
    assert {node.name for node in classes if len(fields_of(node)) > MOST_FIELDS} == RECORDS


def test_a_file_name_is_used_at_most_twice() -> None:
    more = {name: homes for name, homes in repeated(lambda module: [module.name]).items() if len(homes) > 2}
    assert set(more) == {"__init__.py"}


def test_pre_commit_runs_what_make_check_runs_and_downloads_nothing() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    entries = [hook["entry"].removeprefix(".venv/bin/") for hook in config["repos"][0]["hooks"]]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    checks = re.findall(r"^\t\$\(BIN\)/(.+)$", makefile.partition("\ncheck:")[2].partition("\n\n")[0], re.MULTILINE)

    def command(words: str) -> str:
        return re.sub(r" (--force-exclude|--check|\.)(?= |$)", "", words)

    assert [command(entry) for entry in entries] == [command(check) for check in checks]
