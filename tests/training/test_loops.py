"""However a training loop goes through its batches, samples and parts are counted alike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.builders import decision
from tests.training.rig import SAMPLES, Loader, attempt, fitted_gpu, job_file, v100
from tests.training_functions import write_job
from zeus_flows import ZeusDataLoader
from zeus_flows.core.early_stop import CostCut
from zeus_flows.core.records import EnergySource, Observation, Outcome
from zeus_flows.errors import TrainingError
from zeus_flows.gpu.group import Gpus
from zeus_flows.gpu.host import open_host_meter
from zeus_flows.gpu.open_gpus import open_gpus
from zeus_flows.gpu.simulated import Load, Workload
from zeus_flows.job_file import load_job
from zeus_flows.ledger.memory import MemoryLedger
from zeus_flows.recurrence.loop import run_recurrence
from zeus_flows.recurrence.steps import LocalSteps
from zeus_flows.settings import read_settings
from zeus_flows.training.session import Session
from zeus_flows.training.trainer import LocalTrainer


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[Gpus]:
    with v100(tmp_path) as opened:
        yield opened


def session_on(gpus: Gpus, **changes: object) -> Session:
    file = job_file(**changes)
    return Session(file, file.core(gpus.energy_source), decision(1), gpus)


def test_a_loop_that_never_asks_past_the_last_batch_is_not_short_of_one(gpus: Gpus) -> None:
    session = session_on(gpus, max_epochs=3)
    for _ in session.epochs():
        batches = session.steps(Loader(SAMPLES, 64))
        for _ in range(SAMPLES // 64):  # as Lightning and Hugging Face do, which know how many there are
            next(batches)
        session.report_metric(0.1)
    observed = session.observation()
    assert observed.samples_per_epoch == SAMPLES
    assert observed.profile is not None
    assert observed.profile.complete
    assert observed.parts is not None
    assert observed.parts.evaluations.count == 3


def test_such_a_loop_takes_what_one_to_the_end_takes(tmp_path: Path) -> None:
    def run(*, to_the_end: bool) -> Observation:
        with v100(tmp_path) as gpus:
            session = session_on(gpus, max_epochs=2)
            for _ in session.epochs():
                batches = session.steps(Loader(SAMPLES, 64))
                for _ in range(SAMPLES // 64):
                    next(batches)
                if to_the_end:
                    assert next(batches, None) is None
                session.report_metric(0.1)
            return session.observation()

    short, long = run(to_the_end=False), run(to_the_end=True)
    assert short.parts is not None
    assert long.parts is not None
    assert (short.energy_j, short.time_s) == pytest.approx((long.energy_j, long.time_s))
    assert short.parts.evaluations.time_s == pytest.approx(long.parts.evaluations.time_s)


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.zeros(SAMPLES, 1))


def test_a_loader_without_a_length_works_and_its_first_epoch_tells(gpus: Gpus) -> None:
    session = session_on(gpus, max_epochs=3)
    for _ in session.epochs():
        for _batch in session.steps(DataLoader(Endless(), batch_size=64)):
            pass
        session.report_metric(0.1)
    observed = session.observation()
    assert observed.samples_per_epoch == SAMPLES
    assert observed.profile is not None
    assert observed.profile.complete


def test_a_loader_without_a_length_costs_what_one_with_a_length_costs(tmp_path: Path) -> None:
    def run(loader: Any) -> Observation:
        with v100(tmp_path) as gpus:
            session = session_on(gpus, max_epochs=3, mode="off")
            for _ in session.epochs():
                for _batch in session.steps(loader):
                    pass
                session.report_metric(0.1)
            return session.observation()

    without, known = run(DataLoader(Endless(), batch_size=64)), run(Loader(SAMPLES, 64))
    assert (without.energy_j, without.time_s) == pytest.approx((known.energy_j, known.time_s))


def test_gradient_accumulation_goes_through_smaller_batches_of_the_same_samples(gpus: Gpus) -> None:
    session = session_on(gpus, max_epochs=1)
    micro = DataLoader(TensorDataset(torch.zeros(SAMPLES, 1)), batch_size=16)
    for _ in session.epochs():
        assert sum(1 for _ in session.steps(micro)) == SAMPLES // 16
        session.report_metric(0.1)
    assert session.observation().samples_per_epoch == SAMPLES


def test_a_train_function_that_never_uses_steps_is_told_so(gpus: Gpus) -> None:
    session = session_on(gpus)
    for _ in session.epochs():
        session.report_metric(0.95)
    with pytest.raises(TrainingError, match=r"never used session.steps\(\).*for batch in session.steps\(loader\)"):
        session.observation()


@pytest.mark.parametrize(("metric", "converged", "outcome"), [(0.95, True, "converged"), (0.1, False, "exhausted")])
def test_code_after_the_loop_can_tell_whether_the_model_may_be_used(
    gpus: Gpus, metric: float, converged: bool, outcome: str
) -> None:
    session = session_on(gpus, max_epochs=2)
    for _ in session.epochs():
        assert session.outcome is None
        assert not session.converged
        for _batch in session.steps(Loader(SAMPLES, 64)):
            pass
        session.report_metric(metric)
    assert (session.converged, session.outcome) == (converged, outcome)


def test_an_attempt_that_was_stopped_has_not_converged(gpus: Gpus) -> None:
    file = job_file()
    session = Session(file, file.core(), decision(1, cut=CostCut(1.0)), gpus)
    for _ in session.epochs():
        for _batch in session.steps(Loader(SAMPLES, 64)):
            pass
        session.report_metric(0.1)
    assert (session.converged, session.outcome) == (False, Outcome.STOPPED)


def test_the_second_loader_of_the_paper_s_listing_is_measured_as_evaluation() -> None:
    data = TensorDataset(torch.zeros(6400, 1))
    train_loader: ZeusDataLoader[object] = ZeusDataLoader(data, 64, 3, 0.9, device="simulated-v100")
    eval_loader: ZeusDataLoader[object] = ZeusDataLoader(data, 64)
    for _ in train_loader.epochs():
        for _batch in train_loader:
            pass
        for _batch in eval_loader:
            pass
        train_loader.report_metric(0.1)
    observed = train_loader.observation
    assert observed is not None
    assert observed.parts is not None
    assert observed.parts.evaluations.count == 3
    assert observed.parts.evaluations.time_s == pytest.approx(3 * 6.0, rel=0.6)  # slower at low limits


def test_the_simulated_gpu_charges_a_tenth_of_an_epoch_for_an_evaluation_unless_told(tmp_path: Path) -> None:
    def evaluations_s(workload: Workload) -> float:
        with open_gpus(
            "simulated-v100",
            workload=workload,
            batch_size=64,
            samples_per_epoch=None,
            state_dir=tmp_path,
            visible=None,
        ) as gpus:
            observed, _ = attempt(gpus, 0.1, 0.95, file=job_file(mode="off"))
            assert observed.parts is not None
            return observed.parts.evaluations.time_s

    assert evaluations_s(Workload(seconds_per_epoch=60.0)) == pytest.approx(2 * 6.0)
    assert evaluations_s(Workload(seconds_per_epoch=60.0, evaluation_seconds=25.0)) == pytest.approx(2 * 25.0)
    assert evaluations_s(Workload(seconds_per_epoch=60.0, evaluation_seconds=0.0)) == 0.0


def test_the_host_counts_as_a_part_of_its_own_and_favours_higher_limits() -> None:
    def run(watts: float) -> Observation:
        gpus = fitted_gpu("v100", Load(300.0, 238.0, active=0.92, clock_bound=0.6))
        return attempt(gpus, 0.1, 0.95, file=job_file(host_power_w=watts, eta=1.0))[0]

    alone, heavy = run(0.0), run(500.0)
    assert alone.host_energy_j == 0.0
    assert heavy.host_energy_j == pytest.approx(500.0 * heavy.time_s)
    assert heavy.energy_j < 250.0 * heavy.time_s, "the GPU's own energy stays apart"
    assert alone.setting is not None
    assert heavy.setting is not None
    assert heavy.setting > alone.setting, "at the wall, a low limit that takes longer costs more"


def test_rapl_counters_add_up_and_go_round(tmp_path: Path) -> None:
    package, memory = tmp_path / "intel-rapl:0", tmp_path / "intel-rapl:0:1"
    for zone, name in ((package, "package-0"), (memory, "dram")):
        zone.mkdir()
        (zone / "name").write_text(f"{name}\n")
        (zone / "max_energy_range_uj").write_text("1000000\n")
        (zone / "energy_uj").write_text("900000\n")
    meter = open_host_meter(tmp_path)
    assert meter is not None
    (package / "energy_uj").write_text("100000\n")
    (memory / "energy_uj").write_text("950000\n")
    assert meter.energy_j() == pytest.approx(0.2 + 0.05)


def test_a_machine_without_rapl_has_no_meter(tmp_path: Path) -> None:
    assert open_host_meter(tmp_path) is None


def test_where_joules_mean_nothing_cost_is_in_seconds_everywhere(tmp_path: Path) -> None:
    with open_gpus(
        "simulated-v100",
        workload=Workload(),
        batch_size=64,
        samples_per_epoch=None,
        state_dir=tmp_path,
        visible=None,
        shared=True,
    ) as gpus:
        file = job_file(shared_gpu=True, eta=1.0)
        job = file.core(gpus.energy_source)
        session = Session(file, job, decision(1, cut=CostCut(threshold_j=1_000.0)), gpus)
        for _ in session.epochs():
            for _batch in session.steps(Loader(SAMPLES, 64)):
                pass
            session.report_metric(0.1)
        observed = session.observation()
    assert (observed.energy_source, observed.energy_j) == (EnergySource.NONE, 0.0)
    assert (observed.outcome, observed.epochs) == (Outcome.STOPPED, 3), "an epoch takes 300 s"
    assert "would cross the threshold of 16.7 min" in observed.detail


@pytest.mark.parametrize("name", ["thompson", "lookahead", "zeus", "zeus-paper", "power", "default", "grid"])
def test_every_policy_learns_on_time_alone_on_a_gpu_that_is_shared(tmp_path: Path, name: str) -> None:
    path = write_job(tmp_path / "job.yaml", policy=name, shared_gpu=True, eta=1.0)
    file = load_job(path)
    trainer = LocalTrainer(file, read_settings())
    job = file.core(trainer.energy_source)
    steps = LocalSteps(job, MemoryLedger(job, trainer.energy_source), trainer)
    done = [run_recurrence(job, steps) for _ in range(6)]
    assert all(recurrence.converged for recurrence in done)
    for recurrence in done:
        assert recurrence.energy_j == 0.0
        assert recurrence.cost_j(job) == pytest.approx(recurrence.time_s)
    if name == "grid":
        assert len({o.batch_size for r in done for _, o in r.attempts}) > 2, (
            "no limit can be set, so batch sizes are tried"
        )
