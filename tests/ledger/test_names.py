"""Every `zf.` name is in one module, and the schema's page lists exactly those."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from zeus_flows.ledger.mlflow import names

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "docs/reference/mlflow-schema.md"
MODULES = sorted(path for path in (ROOT / "zeus_flows").rglob("*.py") if path != Path(names.__file__))


def all_names() -> set[str]:
    """Return the names that the module has, with `<parameter>` where a name varies."""
    found = {value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}
    for _, function in inspect.getmembers(names, inspect.isfunction):
        signature = inspect.signature(function)
        if signature.return_annotation == "str":
            found.add(function(*(f"<{parameter}>" for parameter in signature.parameters)))
    return found - {names.PREFIX}


def test_the_schema_s_page_lists_exactly_the_names_there_are() -> None:
    listed = set(re.findall(r"`(zf\.[^`]+)`", SCHEMA.read_text(encoding="utf-8")))
    assert sorted(all_names() - listed) == [], "names that the page does not list"
    assert sorted(listed - all_names()) == [], "names that nothing writes"


def test_every_kind_of_run_is_on_the_schema_s_page() -> None:
    text = SCHEMA.read_text(encoding="utf-8")
    assert [kind for kind in names.RunKind if f"`{kind}`" not in text] == []


def test_a_name_varies_only_where_it_says_so() -> None:
    assert all(name.startswith(names.PREFIX) for name in all_names())
    assert "zf.a.<n>.<m>" in all_names()
    assert len(all_names()) > 90


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_other_module_spells_one_out(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    spelt = [
        f"line {node.lineno}: {node.value}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        if re.search(r"\bzf\\?\.", node.value)
    ]
    assert spelt == []
