"""Files that are wrong on purpose: job files, experiment files, traces. Add a line to `WRONG`."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.core.builders import ask, decide, job, observation
from zeus_flows.core.early_stop import PlannedCut, capped, epochs_allowed
from zeus_flows.core.job import Job
from zeus_flows.core.policy import POLICIES
from zeus_flows.core.records import Observation
from zeus_flows.errors import ConfigError
from zeus_flows.experiments.capriccio.file import parse_experiment
from zeus_flows.experiments.replay.traces import jobs_in
from zeus_flows.job_file import load_job, parse_job

MB = 1024 * 1024
JOB = {
    "name": "nightly",
    "train": {"function": "my.module:train"},
    "target": {"metric": "accuracy", "value": 0.9, "better": "higher"},
    "batch_sizes": [32, 64, 128],
    "default_batch_size": 64,
    "max_epochs": 10,
}


def with_(**changes: Any) -> str:
    return yaml.safe_dump(JOB | changes, sort_keys=False)


def bomb(levels: int, width: int = 10) -> str:
    """Return aliases that stand for width ** levels values."""
    lines = ["a0: &a0 [x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join(lines) + "\n"


#: What is wrong, the file, and what the error says.
WRONG = {
    "an unknown key that begins with list": (with_(list_of_things=1), "list_of_things is not a key of this job file"),
    "an unknown key that begins with literal": (with_(literal=1), "literal is not a key"),
    "an unknown key that begins with a bracket": (with_(**{"[x": 1}), "[x is not a key"),
    "a value in place of a section": (
        with_(learning_rate=0.1),
        "learning_rate is a section with keys of its own (base, scaling), not 0.1",
    ),
    "an unknown key within a section": (with_(power_limit={"list": 1}), "power_limit.list is not a key"),
    "an alternative of a type": (with_(power_limit={"limits": ["x"]}), "power_limit.limits.0: "),
    "a key that is no text": (with_(**{"power_limit": {1: 2}}), "keys should be strings"),
    "an alias of what it is part of": ("name: &a [*a]\n", "an alias stands for what it is part of"),
    "a mapping that holds itself": ("&a\nname: *a\n", "an alias stands for what it is part of"),
    "an alias bomb": (bomb(9), "more than 10000 values"),
    "an alias bomb where a name belongs": (bomb(6) + "name: *a5\n", "more than 10000 values"),
    "merges that double": (
        "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 20)),
        "more than 10000 values",
    ),
    "a long text that aliases repeat": (
        f"name: &a {'x' * 200_000}\nbatch_sizes: [{'*a, ' * 9_000}]\n",
        "more than 10000 values",
    ),
    "a name of 200 kB": (with_(name="x" * 200_000), "letters, digits"),
    "a policy of 200 kB": (with_(policy="x" * 200_000), "is not one of thompson"),
    "a key of 100 kB": (with_(**{"k" * 100_000: 1}), "is not a key"),
    "a thousand unknown keys": (with_(**{f"k{i}": 1 for i in range(1_000)}), "and 980 more"),
    "deep lists": (with_(version="@").replace("'@'", "[" * 40 + "]" * 40), "nested deeper than 32 levels"),
    "lists without end": ("[" * 200_000, "nested deeper"),
    "more than fits": ("#" * 300_000, "more than 256 kB"),
    "colours for the terminal": (with_(**{"\x1b[31mred": 1}), "\\x1b[31mred is not a key"),
    "half a character": (with_(version="\ud800"), "a character that no text may have"),
    "a zero byte": (with_(version="a\0b"), "a character that no text may have"),
    "a date that is none": (with_(version="@").replace("'@'", "!!timestamp x"), "not valid YAML"),
    "a number that is none": (with_(version="@").replace("'@'", '!!int ""'), "not valid YAML"),
    "a truth that is none": (with_(version="@").replace("'@'", "!!bool x"), "not valid YAML"),
    "an object of Python": (with_(version="@").replace("'@'", "!!python/object:os.system {}"), "not valid YAML"),
    "an endless number of digits": (with_(seed="@").replace("'@'", "9" * 5_000), "not valid YAML"),
    "an endless budget": (with_(exploration_budget=float("inf")), "exploration_budget: input should be a finite"),
    "an endless deadline": (with_(deadline_seconds=float("inf")), "deadline_seconds: input should be a finite"),
    "an endless learning rate": (with_(learning_rate={"base": float("inf")}), "learning_rate.base: input should be"),
    "an endless limit": (with_(power_limit={"limits": [float("inf")]}), "finite"),
    "an endless profile": (with_(power_limit={"profile_seconds": float("inf")}), "finite"),
    "an endless simulation": (with_(simulation={"seconds_per_epoch": float("inf")}), "finite"),
    "an endless prior": (with_(prior={"mean_j": 1.0, "standard_deviation_j": float("inf")}), "finite"),
    "a beta that is no number": (with_(beta=float("nan")), "beta: input should be"),
    "an endless beta": (with_(beta=float("inf")), "beta: input should be a finite"),
    "more epochs than a number holds": (with_(max_epochs=10**400), "max_epochs: "),
    "a batch size that no memory holds": (with_(batch_sizes=[64, 10**30]), "batch_sizes.1: "),
    "ten thousand batch sizes": (with_(batch_sizes=list(range(1, 9_000))), "batch_sizes: list should have at most 200"),
    "a pattern without end": (
        with_(train={"command": ["x", "{batch_size}"], "metric": {"pattern": "(" * 5_000 + ")" * 5_000}}),
        "is no regular expression",
    ),
    "a count without end in a pattern": (
        with_(train={"command": ["x", "{batch_size}"], "metric": {"pattern": "(a{99999999999999999999})"}}),
        "is no regular expression",
    ),
}


#: Of those, what would take much memory.
LARGE = ["an alias bomb", "an alias bomb where a name belongs", "merges that double", "a long text that aliases repeat"]


def refusal(read: Callable[[], object]) -> str:
    """Return what a reader says of a wrong file."""
    with pytest.raises(ConfigError) as caught:
        read()
    return str(caught.value)


def peak(act: Callable[[], object]) -> int:
    """Return how much memory something took at once, in bytes."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_file_is_refused_in_a_few_short_lines(what: str) -> None:
    text, words = WRONG[what]
    said = refusal(lambda: parse_job(text, source="job.yaml"))
    assert words in said
    assert all(line.startswith("job.yaml:") for line in said.splitlines())
    assert max(map(len, said.splitlines())) < 1_200
    assert len(said.splitlines()) <= 21
    assert "".join(said.splitlines()).isprintable()


@pytest.mark.parametrize("what", LARGE)
def test_a_small_file_that_stands_for_a_large_one_takes_little_memory(what: str) -> None:
    assert peak(lambda: refusal(lambda: parse_job(WRONG[what][0]))) < 16 * MB


@pytest.mark.parametrize("text", [bomb(9), "name: &a [*a]\n", "list: 1\n", "job: {version: 2001-01-01}\n"])
def test_an_experiment_file_is_bounded_as_a_job_file_is(text: str) -> None:
    said = refusal(lambda: parse_experiment(text, source="e.yaml"))
    assert said.startswith("e.yaml:")
    assert max(map(len, said.splitlines())) < 1_200


def test_a_file_that_never_ends_is_read_no_further_than_it_may_be_long() -> None:
    assert "more than 256 kB" in refusal(lambda: load_job(Path("/dev/zero")))


@pytest.mark.parametrize(
    ("column", "value"), [("target_epoch", "1e300"), ("batch_size", "1e18"), ("target_epoch", "9" * 100_000)]
)
def test_a_trace_with_numbers_beyond_measure_is_refused_with_its_line(tmp_path: Path, column: str, value: str) -> None:
    row = {"dataset": "d", "network": "n", "batch_size": "8", "optimizer": "o", "learning_rate": "1", "run": "1"}
    row |= {"target_metric": "1", "target_epoch": "3"} | {column: value}
    (tmp_path / "summary_train.csv").write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
    said = refusal(lambda: jobs_in(tmp_path, {}))
    assert "summary_train.csv:2: " in said
    assert len(said) < 1_000


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("bounds", [{}, {"exploration_budget": 0.05, "deadline_s": 1e7}], ids=["free", "bounded"])
@pytest.mark.parametrize("longer", [1, 1_000])
def test_a_decision_takes_no_more_memory_for_a_job_without_a_limit_of_epochs(
    name: str, bounds: dict[str, float], longer: int
) -> None:
    seen = [(32, 14), (64, 11), (16, 16)]
    for most in (1_000_000, 10**9):
        a_job = job(name, max_epochs=most, **bounds)
        history = [observation(i, b, longer * e, profiled=True, for_job=a_job) for i, (b, e) in enumerate(seen, 1)]

        def plan(a_job: Job = a_job, history: list[Observation] = history) -> None:
            decision = decide(a_job, history, ask(4))
            assert epochs_allowed(decision.cut, epoch_cost_j=10.0, max_epochs=a_job.max_epochs) >= 1

        assert peak(plan) < 8 * MB


def test_plans_beyond_ten_thousand_epochs_agree_with_those_that_weigh_every_epoch() -> None:
    for log_epochs in (1.0, 3.0, 5.0):
        cut = PlannedCut(log_epochs, 0.3, 0.1, 0.05, best_cost_j=900.0, horizon=12.0)
        for rule in (cut, capped(cut, saved_j=400.0), capped(cut, at_most_j=600.0)):
            every = epochs_allowed(rule, epoch_cost_j=7.0, max_epochs=10_000)
            assert epochs_allowed(rule, epoch_cost_j=7.0, max_epochs=1_000_000) == every
    long = PlannedCut(9.0, 0.3, 0.1, 0.05, best_cost_j=20_000.0, horizon=12.0)
    every = epochs_allowed(long, epoch_cost_j=1.0, max_epochs=10_000)
    assert epochs_allowed(long, epoch_cost_j=1.0, max_epochs=10_001) == pytest.approx(every, rel=0.005)
