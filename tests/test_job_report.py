"""A job's report: every number computed once more from the runs, and how it looks in a terminal and as HTML."""

from __future__ import annotations

import io
import json
import re
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from mlflow import MlflowClient
from mlflow.entities import Run
from rich.console import Console

from tests.core.savings_world import ARMS, B0, GPU, MAX_EPOCHS, Simulated, World
from zeus_flows.cli.commands import main
from zeus_flows.core import policy
from zeus_flows.core.attempt import AttemptFailed
from zeus_flows.core.drift_windows import beliefs
from zeus_flows.core.job import Job
from zeus_flows.core.json import jsonable
from zeus_flows.core.records import Decision, EnergySource, Observation
from zeus_flows.job_file import load_job
from zeus_flows.ledger.mlflow.record_text import load_observation
from zeus_flows.ledger.open_ledger import open_durable
from zeus_flows.recurrence.loop import run_recurrence
from zeus_flows.recurrence.steps import LocalSteps
from zeus_flows.reporting.job_report import read_report
from zeus_flows.reporting.recorded import open_recorded
from zeus_flows.reporting.report_page import report_page
from zeus_flows.reporting.report_text import show_report

pytestmark = pytest.mark.slow

KWH_J = 3.6e6
RECURRENCES = 14
WORLD = replace(World.drawn(11), policy="thompson", failures=0.15, host_w=60.0, drift_at=None, control=None, eta=0.5)
JOB_FILE = f"""\
name: ranker
train: {{function: "tests.training_functions:train"}}
target: {{metric: m, value: 1.0, better: higher}}
batch_sizes: {list(ARMS)}
default_batch_size: {B0}
max_epochs: {MAX_EPOCHS}
device: simulated-v100
host_power_w: 60
seed: 11
model: {{name: ranker}}
prices: {{hourly: prices.csv, currency: EUR, carbon_g_per_kwh: 300, location: Zurich}}
"""


class Fingerprinted(Simulated):
    """The world's trainer, whose observations say what they compare with."""

    def train(self, job: Job, decision: Decision, *rest: Any, **named: Any) -> Observation:
        """Return how an attempt goes."""
        try:
            made = super().train(job, decision, *rest, **named)
        except AttemptFailed as failed:
            failed.observation = replace(failed.observation, fingerprint=job.fingerprint)
            raise
        return replace(made, fingerprint=job.fingerprint, sensor="model")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A job file, and the database that holds its recurrences: real policies, ledger and MLflow."""
    folder = tmp_path_factory.mktemp("report")
    path, uri = folder / "job.yaml", f"sqlite:///{folder}/mlflow.db"
    path.write_text(JOB_FILE, encoding="utf-8")
    job = load_job(path).core()
    ledger = open_durable(job, tracking_uri=uri, energy_source=EnergySource.SIMULATED, state_dir=folder / "state")
    with closing(ledger):
        steps = LocalSteps(job, ledger, Fingerprinted(WORLD))
        for _ in range(RECURRENCES):
            with suppress(RuntimeError):  # lost the GPU
                run_recurrence(job, steps)
    hours = sorted({int(run.info.start_time) // 3_600_000 for run in runs_of(uri)})
    rows = [f"{datetime.fromtimestamp(3600 * (hours[0] + i), UTC).isoformat()},{0.2 + 0.01 * i}" for i in range(3)]
    (folder / "prices.csv").write_text("\n".join(["hour,per_kwh", *rows, ""]), encoding="utf-8")
    return path, uri


def runs_of(uri: str) -> list[Run]:
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("ranker")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id], "tags.`zf.kind` = 'attempt'", max_results=1000)
    return [run for run in found if "zf.observation" in run.data.params]


def command(*words: str) -> Any:
    return CliRunner().invoke(main, list(words))


def document(recorded: tuple[Path, str], *flags: str) -> dict[str, Any]:
    path, uri = recorded
    done = command("report", str(path), "--tracking-uri", uri, "--json", *flags)
    assert done.exit_code == 0, done.output
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def observed(uri: str) -> list[tuple[float, Observation]]:
    found = [(run.info.start_time / 1000, load_observation(run.data.params["zf.observation"])) for run in runs_of(uri)]
    return sorted(found, key=lambda item: item[1].order)


def charged(began_s: float, one: Observation) -> tuple[float, float]:
    """Return money and priced joules of an attempt, hour by hour, by the file that the fixture wrote."""
    money = priced_j = 0.0
    joules, first = one.energy_j + one.host_energy_j, int(began_s // 3600)
    for hour in range(first, first + int(one.time_s // 3600) + 2):
        seconds = min(began_s + one.time_s, 3600.0 * (hour + 1)) - max(began_s, 3600.0 * hour)
        if seconds > 0 and hour - FIRST[0] < 3:
            money += joules * seconds / one.time_s / KWH_J * (0.2 + 0.01 * (hour - FIRST[0]))
            priced_j += joules * seconds / one.time_s
    return money, priced_j


FIRST: list[int] = []  # the first hour in which anything ran


def test_every_number_is_what_the_runs_come_to(recorded: tuple[Path, str]) -> None:
    path, uri = recorded
    told, attempts = document(recorded), observed(uri)
    FIRST[:] = [int(attempts[0][0] // 3600)]
    job = load_job(path).core()
    state = policy.fold(job, [o for _, o in attempts])
    saved = policy.saved(job, state)
    assert saved.so_far is not None
    assert saved.so_far.power_only is not None
    assert saved.from_now_on is not None

    money, priced_j = (sum(part) for part in zip(*(charged(*one) for one in attempts), strict=True))
    rate = money / priced_j * KWH_J
    assert 0.2 <= rate <= 0.22
    assert told["prices"]["mean"]["per_kwh"] == pytest.approx(rate)
    assert told["prices"]["mean"]["carbon_g_per_kwh"] == pytest.approx(300.0)
    whole_j = sum(o.energy_j + o.host_energy_j for _, o in attempts)
    assert told["read"]["energy_j"] == pytest.approx(whole_j)
    assert told["read"]["money"] == pytest.approx(money)
    assert told["read"]["carbon_kg"] == pytest.approx(whole_j / KWH_J * 0.3)
    assert (told["read"]["recurrences"], told["read"]["all"]) == (len({o.recurrence for _, o in attempts}), True)

    for name, compared in (("so_far", saved.so_far), ("each_from_now_on", saved.from_now_on)):
        assert told["saved"][name]["recurrences"] == compared.recurrences
        assert told["saved"][name]["spent"] == jsonable(compared.spent)
        for against, line in (("default", compared.total), ("power_only", compared.power_only)):
            assert line is not None
            mine = told["saved"][name][against]
            ends = {"amount": line.amount, "low": line.low, "high": line.high}
            instead_j = compared.spent.energy_j + line.amount.energy_j
            assert mine["would_have_taken"] == pytest.approx(instead_j / KWH_J)
            for end, amount in ends.items():
                kwh = amount.energy_j / KWH_J
                assert mine["energy_kwh"][end] == pytest.approx(kwh)
                assert mine["percent"][end] == pytest.approx(100 * amount.energy_j / instead_j)
                assert mine["time_h"][end] == pytest.approx(amount.time_s / 3600)
                assert mine["money"][end] == pytest.approx(kwh * rate)
                assert mine["carbon_kg"][end] == pytest.approx(kwh * 0.3)
    assert told["savings"] == policy_document(saved)
    assert told["arms"] == jsonable(beliefs(job, state))
    assert told["energy_source"] == "simulated"
    assert told["gpu"] == GPU.key
    assert told["recurrences"] == RECURRENCES
    (window,) = told["windows"]
    assert (window["number"], window["first"], window["is_open"]) == (1, 1, True)
    assert told["models"]["versions"] == []


def policy_document(saved: Any) -> Any:
    from zeus_flows.core.savings import document as plain

    return json.loads(json.dumps(plain(saved)))


def test_the_timeline_has_the_sums_over_each_recurrences_attempts(recorded: tuple[Path, str]) -> None:
    told, attempts = document(recorded), observed(recorded[1])
    FIRST[:] = [int(attempts[0][0] // 3600)]
    grouped = {n: list(of) for n, of in groupby(attempts, key=lambda item: item[1].recurrence)}
    assert [entry["recurrence"] for entry in told["timeline"]] == list(grouped)
    for entry in told["timeline"]:
        mine = grouped[entry["recurrence"]]
        last = mine[-1][1]
        energy_j = sum(o.energy_j + o.host_energy_j for _, o in mine)
        time_s = sum(o.time_s for _, o in mine)
        assert entry["energy_j"] == pytest.approx(energy_j)
        assert entry["time_s"] == pytest.approx(time_s)
        assert entry["cost"] == pytest.approx(0.5 * energy_j + 0.5 * GPU.max_power_w * time_s)
        assert entry["money"] == pytest.approx(sum(charged(*one)[0] for one in mine))
        assert entry["carbon_kg"] == pytest.approx(energy_j / KWH_J * 0.3)
        assert entry["batch_sizes"] == [o.batch_size for _, o in mine]
        assert (entry["outcome"], entry["setting"]) == (last.outcome.value, last.setting)
        assert datetime.fromisoformat(entry["began"]).timestamp() == pytest.approx(mine[0][0], abs=1e-3)


def test_a_setting_s_energy_and_time_are_those_of_the_forecast_where_it_is_one(recorded: tuple[Path, str]) -> None:
    told = document(recorded)
    (default,) = [s for s in told["settings"] if s["is_default"]]
    forecast = told["savings"]["from_now_on"]
    assert default["energy_j"] == pytest.approx(forecast["baseline"]["energy_j"])
    assert default["time_s"] == pytest.approx(forecast["baseline"]["time_s"])
    best = told["savings"]["default"]
    (mine,) = [
        s
        for s in told["settings"]
        if (s["batch_size"], s["setting"]) == (best["best_batch_size"], best["best_setting"])
    ]
    ran_j = forecast["baseline"]["energy_j"] - forecast["total"]["amount"]["energy_j"]
    assert mine["energy_j"] == pytest.approx(ran_j)


class Numbers(HTMLParser):
    """Collects what a page says, and whatever it would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what would be fetched or run."""
        named = dict(attrs)
        self.outside += [f"{tag} {name}" for name in ("src", "href", "xlink:href", "onclick") if name in named]
        self.outside += [tag] if tag in ("script", "link", "iframe", "img") else []

    def handle_data(self, data: str) -> None:
        """Keep the text."""
        self.text.append(data)


def test_the_page_needs_nothing_else_and_says_what_the_terminal_says(recorded: tuple[Path, str]) -> None:
    path, uri = recorded
    file = path.parent / "report.html"
    done = command("report", str(path), "--tracking-uri", uri, "--html", str(file))
    assert (done.exit_code, done.stdout) == (0, f"wrote {file}\n"), done.output
    page = Numbers()
    text = file.read_text(encoding="utf-8")
    page.feed(text)
    assert page.outside == []
    assert "url(" not in text
    assert "prefers-color-scheme:dark" in text
    said = " ".join(" ".join(page.text).split())
    for words in ("SIMULATED", "power-only", "Energy against time", "Drift windows", "Models", "nine times in ten"):
        assert words in said, words
    shown = printed(recorded)
    for line in shown.splitlines():
        if line.startswith(("the default", "power-only")):
            for cell in re.split(r"\s{2,}", line.strip())[1:]:
                assert cell in said, cell


def printed(recorded: tuple[Path, str], width: int = 80) -> str:
    path, uri = recorded
    job_file = load_job(path)
    opened = open_recorded(job_file, uri)
    assert opened is not None
    tariff = job_file.prices.tariff(path.parent)
    report = read_report(job_file, opened, uri=uri, where="here", tariff=tariff, at=datetime(2026, 3, 1, tzinfo=UTC))
    console = Console(file=io.StringIO(), width=width)
    show_report(console, report)
    assert isinstance(console.file, io.StringIO)
    assert "SIMULATED" in report_page(report)
    return console.file.getvalue()


def test_it_fits_eighty_columns_and_cuts_nothing_off(recorded: tuple[Path, str]) -> None:
    text = printed(recorded)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text
    assert "energy SIMULATED" in text
    assert "the mean of the hours in which all recurrences ran" in " ".join(text.split())


def test_hours_without_a_price_are_named_and_a_wrong_file_exits_2(recorded: tuple[Path, str], tmp_path: Path) -> None:
    path, uri = recorded
    other = tmp_path / "other.csv"
    other.write_text("hour,per_kwh\n2001-01-01T00:00Z,0.1\n", encoding="utf-8")
    told = document(recorded, "--prices", str(other))
    assert told["prices"]["mean"]["per_kwh"] is None
    assert told["saved"]["so_far"]["default"]["money"] is None
    assert len(told["prices"]["hours_without_price"]) >= 1
    shown = command("report", str(path), "--tracking-uri", uri, "--prices", str(other))
    assert "without a price" in shown.stdout
    other.write_text("hour,per_kwh\nnever,0.1\n", encoding="utf-8")
    done = command("report", str(path), "--tracking-uri", uri, "--prices", str(other))
    assert done.exit_code == 2
    assert "other.csv:2: hour must be" in done.stderr


def test_only_the_newest_recurrences_are_read_unless_all_are_asked_for(
    recorded: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeus_flows.reporting.job_report.NEWEST", 4)
    some, every = document(recorded), document(recorded, "--all")
    assert [entry["recurrence"] for entry in some["timeline"]] == list(range(RECURRENCES - 3, RECURRENCES + 1))
    assert (some["read"]["all"], every["read"]["all"]) == (False, True)
    assert len(every["timeline"]) == RECURRENCES
    for told in (some, every):
        assert told["savings"] == every["savings"]


def a_version(uri: str, recurrence: int) -> int:
    """Register the model of a recurrence's last attempt, as a pass over the models would."""
    client = MlflowClient(uri)
    with suppress(Exception):
        client.create_registered_model("ranker", {"zf.job": "ranker"})
    mine = [run for run in runs_of(uri) if run.data.tags["zf.recurrence"] == str(recurrence)]
    last = max(mine, key=lambda run: int(run.data.tags["zf.attempt"]))
    return int(client.create_model_version("ranker", str(Path("nothing").absolute()), last.info.run_id).version)


def test_a_statement_has_all_attempts_of_its_recurrence_and_what_came_before(recorded: tuple[Path, str]) -> None:
    path, uri = recorded
    attempts = observed(uri)
    FIRST[:] = [int(attempts[0][0] // 3600)]
    number = max(o.recurrence for _, o in attempts if o.converged)
    version = a_version(uri, number)
    words = ("statement", str(path), str(version), "--tracking-uri", uri, "--with-history")
    done = command(*words, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    mine = [one for one in attempts if one[1].recurrence == number]
    energy_j = sum(o.energy_j + o.host_energy_j for _, o in mine)
    assert told["energy_kwh"] == pytest.approx(energy_j / KWH_J)
    assert told["machine_kwh"] == pytest.approx(sum(o.host_energy_j for _, o in mine) / KWH_J)
    assert told["money"] == pytest.approx(sum(charged(*one)[0] for one in mine))
    assert told["carbon_kg"] == pytest.approx(energy_j / KWH_J * 0.3)
    assert told["method"] == "simulated: a model of the GPU, not a measurement"
    assert told["co2_eq_emissions"] is None, "nothing was measured"
    before = [o for _, o in attempts if o.recurrence < number]
    assert told["before"]["energy_kwh"] == pytest.approx(
        sum(o.energy_j + o.host_energy_j for o in before) / KWH_J, rel=1e-4
    )
    assert told["before"]["recurrences"] == len({o.recurrence for o in before})
    markdown = command(*words).stdout
    assert markdown.startswith(f"## Training energy of ranker, version {version}\n")
    assert markdown.count("(simulated)") >= 4
    assert "Zurich" in markdown
    missing = command("statement", str(path), "99", "--tracking-uri", uri)
    assert missing.exit_code == 2
    assert "ranker has no version '99'" in missing.stderr


def test_a_job_that_never_ran_has_no_report_and_no_database(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB_FILE.replace("hourly: prices.csv, ", ""), encoding="utf-8")
    for words in (("report", str(path)), ("statement", str(path), "1")):
        done = command(*words, "--tracking-uri", f"sqlite:///{tmp_path}/none.db")
        assert done.exit_code == 2
        assert f"zeus-flows run {path}" in done.stderr
    assert not (tmp_path / "none.db").exists()
