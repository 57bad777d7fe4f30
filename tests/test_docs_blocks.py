"""Every code block of the documentation runs, every YAML block is valid, every command exists."""

from __future__ import annotations
import __future__

import ast
import inspect
import re
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch
import yaml
from torch.utils.data import DataLoader, TensorDataset

from tests.builders import decision
from tests.docs_blocks import PAGES, ROOT, Block, blocks
from tests.training.rig import job_file, v100
from zeus_flows import Outcome, Question, Session
from zeus_flows.cli import main
from zeus_flows.experiments.capriccio.file import parse_experiment
from zeus_flows.job_file import parse_job
from zeus_flows.ledger.memory import MemoryLedger
from zeus_flows.recurrence.loop import run_recurrence
from zeus_flows.recurrence.steps import LocalSteps
from zeus_flows.settings import read_settings
from zeus_flows.training.keeping import Keeper
from zeus_flows.training.trainer import LocalTrainer

#: What a reader has beside a fragment of a job file.
JOB: dict[str, Any] = {
    "name": "nightly",
    "train": {"function": "my_training:train"},
    "target": {"metric": "accuracy", "value": 0.9, "better": "higher"},
    "batch_sizes": [32, 64, 128],
    "default_batch_size": 64,
    "max_epochs": 10,
}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def of(*languages: str) -> pytest.MarkDecorator:
    """Run a test for every block in given languages."""
    return pytest.mark.parametrize("block", blocks(*languages), ids=str)


def test_every_block_has_a_language_that_is_tested() -> None:
    tested = {"python", "yaml", "console", "text", "diff"}
    assert [str(block) for block in blocks() if block.language not in tested] == []
    assert {block.language for block in blocks()} == tested


# -- Python --------------------------------------------------------------------------------------------------------


class Number(float):
    """A metric that fragments use as a value and as a function."""

    def __call__(self, *_: object) -> float:
        return float(self)


def stand_ins(folder: Path) -> dict[str, Any]:
    """Return what the reader's own code would be: a model, its data, and functions that reach the target."""
    data = TensorDataset(torch.zeros(640, 4))
    model = torch.nn.Linear(4, 1)
    found = iter([0.5, 0.7, *[0.95] * 100])
    parts = SimpleNamespace(from_pretrained=lambda _: SimpleNamespace(save_pretrained=lambda _: None))

    def load(source: object, recurrence: int | None = None) -> object:
        if recurrence is not None:
            return data, data
        return model if isinstance(source, Path) and source.exists() else data

    return {
        "__name__": "reader",
        "torch": torch,
        "Adam": torch.optim.Adam,
        "DataLoader": DataLoader,
        "transformers": SimpleNamespace(AutoModel=parts, AutoTokenizer=parts),
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters()),
        "loader": DataLoader(TensorDataset(torch.zeros(1000, 4))),
        "train_set": data,
        "valid_set": data,
        "eval_set": data,
        "batch_size": 64,
        "max_epochs": 10,
        "target_metric": 0.9,
        "validation_metric": 0.95,
        "accuracy": Number(0.95),
        "build": lambda: model,
        "build_model": lambda: model,
        "load": load,
        "rows": lambda recurrence: recurrence,
        "learn": lambda *_: None,
        "loss": lambda model, batch: model(batch[0]).mean(),
        "evaluate": lambda *_: next(found),
        "publish": lambda model: (folder / "published").touch(),
    }


@contextmanager
def a_session(folder: Path) -> Iterator[Session]:
    """A real session on a simulated GPU."""
    with v100(folder) as gpus:
        keeper = Keeper(folder / "models", lambda: "", "")
        session = Session(job_file(), job_file().core(), decision(1), gpus, keeper=keeper)
        with session.as_current():
            yield session
        if keeper.holds:
            keeper.folder.rename(folder / "kept")


def execute(source: str, block: Block, names: dict[str, Any]) -> None:
    flags = __future__.annotations.compiler_flag  # stubs name types that a reader need not import
    exec(compile(source, str(block), "exec", flags=flags), names)  # noqa: S102


def as_train_function(block: Block) -> str:
    """Return a fragment of a train function as a whole one."""
    text = block.text
    if "session.epochs()" not in text:
        text = f"for epoch in session.epochs():\n{textwrap.indent(text, '    ')}"
    return f"def train(session):\n{textwrap.indent(text, '    ')}"


def is_fragment(block: Block) -> bool:
    return "session." in block.text and "def " not in block.text


def call(function: Callable[..., Any], first: object, names: dict[str, Any], folder: Path) -> Any:
    """Call a reader's function as zeus_flows would, with a path for each of its parameters."""
    wanted = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return function(first, **{p.name: folder / p.name for p in wanted if p.default is p.empty})


@of("python")
def test_python_blocks_run(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = stand_ins(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["reader.py"])
    if "from_pretrained" in block.text:
        monkeypatch.setitem(sys.modules, "transformers", names["transformers"])
    if "ZeusFlowsSettings(" in block.text:  # saved in tests/orchestration, on a server that is there for it
        monkeypatch.setattr("zeus_flows.orchestration.blocks.ZeusFlowsSettings.save", lambda self, name: None)
    source = as_train_function(block) if is_fragment(block) else block.text
    if (
        "ZeusDataLoader(train_set" in source and "def train" not in source
    ):  # it takes the GPU there is, so it gets a session's
        with a_session(tmp_path) as session:
            execute(source, block, names)
            assert session.observation().outcome is Outcome.CONVERGED
        return
    given = dict(names)
    execute(source, block, names)
    if "init_process_group" in source:  # of ranks: `test_a_guides_example_recurs` starts them
        return
    if names.get("train") is not given.get("train"):
        with a_session(tmp_path) as session:
            call(names["train"], session, names, tmp_path)
            if "..." not in source:
                assert session.observation().outcome is Outcome.CONVERGED
                assert (tmp_path / "published").exists() == ("publish(" in source)
    if names["evaluate"] is not given["evaluate"]:  # a drift gate
        kept = str(tmp_path / "kept")
        found = call(names["evaluate"], Question(9, 7, 1, 64, kept), names, tmp_path)
        assert (found["accuracy"] if isinstance(found, dict) else found) > 0.8
    assert "Traceback" not in capsys.readouterr().err


# -- guides --------------------------------------------------------------------------------------------------------


@of("diff")
def test_a_diff_has_as_many_lines_as_its_heading_says_and_taken_back_leaves_a_script_without_us(block: Block) -> None:
    removed, added = ([line[1:] for line in block.text.splitlines() if line[0] == sign] for sign in "-+")
    said = re.search(r"^## (\w+) lines change$", (ROOT / block.page).read_text(encoding="utf-8"), re.MULTILINE)
    assert said is not None
    numbers = ["Zero", "One", "Two", "Three", "Four", "Five", "Six", "Seven"]
    assert numbers.index(said[1]) == max(len(removed), len(added))
    (before,) = [b.text for b in blocks("python") if b.page == block.page and b.text.startswith("# ")]
    for line in reversed(block.text.splitlines()):
        if line.startswith("+"):
            assert before.count(f"{line[1:]}\n") == 1, line
            replaced = removed.pop() if removed else None
            before = before.replace(f"{line[1:]}\n", "" if replaced is None else f"{replaced}\n")
    assert not re.search("zeus|session", before)
    ast.parse(before)


@pytest.mark.parametrize(
    ("form", "count"),
    [
        *((name, 2) for name in ("huggingface", "lightning", "accelerate", "function", "zeus-data-loader")),
        pytest.param("data-parallel", 1, marks=[pytest.mark.slow, pytest.mark.xdist_group("ranks")]),
    ],
)
def test_a_guides_example_recurs(form: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = f"docs/guides/{form}.md"
    (example,) = [b.text for b in blocks("python") if b.page == page and b.text.startswith("# ")]
    (file,) = [b.text for b in blocks("yaml") if b.page == page and "function:" in b.text]
    name = example.partition("\n")[0].removeprefix("# ")
    (tmp_path / name).write_text(example, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    job = parse_job(file, source=page).overridden(simulate="v100")
    trainer = LocalTrainer(job, read_settings())
    core = job.core(trainer.energy_source)
    steps = LocalSteps(core, MemoryLedger(core, trainer.energy_source), trainer)
    assert all(run_recurrence(core, steps).converged for _ in range(count))


# -- YAML ----------------------------------------------------------------------------------------------------------


@of("yaml")
def test_yaml_blocks_are_valid(block: Block) -> None:
    read = yaml.safe_load(block.text)
    assert isinstance(read, dict)
    if "slices" in read:
        if read["job"] == {"...": None}:
            read["job"] = {key: value for key, value in JOB.items() if key not in ("name", "train")}
        assert parse_experiment(yaml.safe_dump(read), source=str(block)).name == read["name"]
    elif {"name", "train", "target"} <= set(read):
        assert parse_job(block.text, source=str(block)).name == read["name"]
    else:
        assert parse_job(yaml.safe_dump(JOB | read), source=str(block)).name == "nightly"


# -- commands ------------------------------------------------------------------------------------------------------


def commands_typed() -> list[tuple[str, str]]:
    """Return every command of a console block or an indented one, with where it is."""
    typed = []
    for block in blocks("console"):
        assert all(line.startswith("$ ") for line in block.text.splitlines()), f"{block}: a prompt is missing"
        typed += [(str(block), line.removeprefix("$ ")) for line in block.text.splitlines()]
    for page in [page for page in PAGES if page.name != "cli.md"]:  # that is the commands' own help
        for command in re.findall(r"^    ((?:zeus-flows|make) .*)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            typed.append((page.name, command))
    return typed


def commands_mentioned() -> list[tuple[str, str]]:
    """Return every command in a running text or a comment: it may lack its arguments."""
    pages = [page for page in PAGES if page.name != "cli.md"]
    files = [ROOT / "zeus_flows/templates/job.yaml", *(ROOT / "deployments").rglob("*.yaml")]
    found = {
        (path.name, c) for path in [*pages, *files] for c in re.findall(r"`((?:zeus-flows|make) [^`]+)", read(path))
    }
    found |= {(path.name, c) for path in files for c in re.findall(r"^#.*? (zeus-flows [^`\n]+)", read(path), re.M)}
    return sorted(found)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def find_command(words: list[str]) -> tuple[click.Command, list[str]]:
    command: click.Command = main
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"there is no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


#: `make unit` comes with the tests that are laid out for it.


def check_make(words: list[str]) -> None:
    for target in words:
        if "=" not in target:
            assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), f"there is no target {target}"


@pytest.mark.parametrize(("where", "command"), commands_typed())
def test_every_command_that_is_typed_would_be_understood(where: str, command: str) -> None:
    program, *words = shlex.split(command, comments=True)
    match program:
        case "zeus-flows":
            found, rest = find_command(words)
            found.make_context(found.name, rest)
            for word in words:
                assert not word.startswith("deployments/") or (ROOT / word).exists(), word
        case "make":
            check_make(words)
        case "python" if words[0] == "-c":
            ast.parse(words[1])
        case "python":
            assert (ROOT / words[0]).exists(), words[0]
        case "mlflow":
            assert words[0] == "server"
        case "export":
            assert all("=" in word for word in words)
        case "pip":
            assert words[0] == "install"
        case "prefect":
            for word in words:
                is_deployment = word.partition("/")[0] in ("recurrence", "capriccio", "janitor")
                assert "/" not in word or "://" in word or is_deployment or (ROOT / word).exists(), word
        case _:
            pytest.fail(f"{where}: nothing checks {program}")


@pytest.mark.parametrize(("where", "command"), commands_mentioned())
def test_every_command_that_is_mentioned_exists(where: str, command: str) -> None:
    program, *words = re.sub(r"#.*|[\])}:;,.]+$", "", command).split()
    if program == "make":
        if re.fullmatch(r"[a-z]+", words[0]):
            check_make(words[:1])
        return
    found, rest = find_command(words)
    options = {option for parameter in found.params for option in [*parameter.opts, *parameter.secondary_opts]}
    for word in rest:
        assert not word.startswith("-") or word.partition("=")[0] in {*options, "--help", "--version"}, word


def test_every_extra_that_is_named_exists() -> None:
    texts = [*PAGES, *(ROOT / "zeus_flows").rglob("*.py"), *(ROOT / "zeus_flows").rglob("*.yaml"), ROOT / "Makefile"]
    named = {
        extra
        for path in texts
        for found in re.findall(r"(?:zeus-flows|'\.)\[([\w,]+)\]", path.read_text(encoding="utf-8"))
        for extra in found.split(",")
    }
    assert "flights" in named
    assert named <= set(EXTRAS)


def test_every_script_that_is_named_exists() -> None:
    for page in PAGES:
        for script in re.findall(r"python ([\w/]+\.py)", page.read_text(encoding="utf-8")):
            assert (ROOT / script).exists(), f"{page.name}: {script}"
