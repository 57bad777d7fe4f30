"""The public names: exported, typed, documented, and quick to import."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import zeus_flows
from zeus_flows.errors import ZeusFlowsError

API = (Path(__file__).parents[1] / "docs/reference/api.md").read_text(encoding="utf-8")
PUBLIC = [name for name in zeus_flows.__all__ if name != "__version__"]
ERRORS = [name for name in PUBLIC if hasattr(getattr(zeus_flows, name), "exit_code")]
CLASSES = [
    "KeptModel",
    "Outcome",
    "Question",
    "Session",
    "ZeusDataLoader",
    "ZeusLightningCallback",
    "ZeusTrainerCallback",
]
#: Members of the public classes that zeus_flows calls itself, or a framework that it is a callback of (`on_...`).
NOT_FOR_USERS = {
    *("as_current", "begin_epoch", "begin_steps", "begin_training", "close", "end_epoch", "ended_by_itself"),
    *("failed", "observation", "parts", "setup", "stepped"),
}


def sections() -> dict[str, str]:
    """Return the text of each name on the page."""
    parts = re.split(r"^### `(\w+)`$", API, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def stub(name: str) -> Any:
    """Return the definition that the page gives for a name."""
    for block in re.findall(r"```python\n(.*?)```", sections()[name], re.DOTALL):
        for node in ast.parse(block).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return node
    raise AssertionError(f"the page does not define {name}")


def source_of(what: Any) -> Any:
    return ast.parse(textwrap.dedent(inspect.getsource(what))).body[0]


def signature(function: ast.FunctionDef) -> tuple[str, str]:
    assert function.returns is not None
    return ast.unparse(function.args), ast.unparse(function.returns)


@pytest.mark.parametrize("name", zeus_flows.__all__)
def test_every_public_name_can_be_imported_and_is_found_by_dir(name: str) -> None:
    assert getattr(zeus_flows, name) is not None
    assert name in dir(zeus_flows)


def test_the_page_documents_the_public_names_and_no_others() -> None:
    assert sorted(sections()) == sorted(zeus_flows.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_a_docstring(name: str) -> None:
    assert getattr(zeus_flows, name).__doc__


@pytest.mark.parametrize("name", CLASSES)
def test_the_page_shows_every_method_as_it_is(name: str) -> None:
    public = getattr(zeus_flows, name)
    shown = {node.name: node for node in stub(name).body if isinstance(node, ast.FunctionDef)}
    real = {node.name: node for node in source_of(public).body if isinstance(node, ast.FunctionDef)}
    for method, node in shown.items():
        assert signature(node) == signature(real[method]), f"{name}.{method}"
        decorators = [ast.unparse(d) for d in node.decorator_list]
        assert decorators == [ast.unparse(d) for d in real[method].decorator_list if ast.unparse(d) == "property"]
    hidden = {method for method in real if not method.startswith(("_", "on_"))} - set(shown)
    assert hidden <= NOT_FOR_USERS, f"{name} has methods that the page does not show"


def test_the_page_shows_every_function_as_it_is() -> None:
    for name in ("current_session", "open_model"):
        assert signature(stub(name)) == signature(source_of(getattr(zeus_flows, name)))


def test_the_page_shows_every_field_of_a_question_and_every_outcome() -> None:
    fields = {node.target.id: ast.unparse(node.annotation) for node in stub("Question").body if hasattr(node, "target")}
    assert fields == zeus_flows.Question.__annotations__
    outcomes = {
        ast.unparse(n.targets[0]): ast.literal_eval(n.value) for n in stub("Outcome").body if isinstance(n, ast.Assign)
    }
    assert outcomes == {outcome.name: outcome.value for outcome in zeus_flows.Outcome}


def test_the_page_shows_every_attribute_of_a_session() -> None:
    shown = [ast.unparse(node.target) for node in stub("Session").body if isinstance(node, ast.AnnAssign)]
    attributes = (zeus_flows.Session.__doc__ or "").partition("Attributes:")[2]
    assert shown == re.findall(r"^\s+(\w+): ", attributes, re.MULTILINE)


@pytest.mark.parametrize("name", ERRORS)
def test_the_page_says_the_exit_code_of_an_error_and_what_it_is_a_kind_of(name: str) -> None:
    error, text = getattr(zeus_flows, name), sections()[name]
    parent = error.__base__
    if issubclass(parent, ZeusFlowsError) and parent is not ZeusFlowsError:
        assert f"A `{parent.__name__}`" in text
    if error.exit_code != getattr(parent, "exit_code", None):
        assert f"xit code {error.exit_code}" in text


def test_the_package_says_that_it_is_typed_and_so_are_the_public_names() -> None:
    assert files("zeus_flows").joinpath("py.typed").is_file()
    for name in [*CLASSES, "current_session", "open_model"]:
        for node in ast.walk(source_of(getattr(zeus_flows, name))):
            if isinstance(node, ast.FunctionDef):
                taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                assert node.returns is not None, f"{name}: {node.name} does not say what it returns"
                assert all(a.annotation is not None or a.arg == "self" for a in taken), f"{name}: {node.name}"


def test_the_version_is_the_installed_one_and_has_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert zeus_flows.__version__ == metadata.version("zeus-flows")

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert zeus_flows.__version__ == "0+unknown"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        zeus_flows.nonsense  # noqa: B018


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = ("prefect", "mlflow", "torch", "numpy", "pydantic", "transformers", "accelerate", "lightning")
    code = f"import sys, zeus_flows; dir(zeus_flows); sys.exit(', '.join(m for m in {heavy} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == ""
