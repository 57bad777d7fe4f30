"""MLflow drops, hangs or delays: training does not wait for it, and everything arrives once."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import ViewType

from tests.builders import JOB, decision, observation
from tests.ledger import brief
from tests.ledger.proxy import Proxy, proxy_to
from tests.ledger.servers import PASSWORD, USER, free_port
from tests.training_functions import write_job
from zeus_flows.core.attempt import EpochReport
from zeus_flows.core.job import Job
from zeus_flows.core.records import EnergySource
from zeus_flows.errors import StoreDenied, StoreUnavailable
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.open_ledger import open_direct

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ledger-servers")]

#: What a busy machine may add to the two seconds: an fsync of the outbox takes its time there.
GRACE_S = 1.0


@pytest.fixture
def proxy(server_on_sqlite: str) -> Iterator[Proxy]:
    with proxy_to(server_on_sqlite) as proxy:
        yield proxy


@pytest.fixture
def job() -> Job:
    return replace(JOB, name=f"nightly-{uuid.uuid4().hex[:8]}")


def direct(job: Job, uri: str) -> MlflowLedger:
    return open_direct(job, tracking_uri=uri, energy_source=EnergySource.SIMULATED)


def epochs_written(uri: str, run_id: str) -> list[int]:
    return [m.step for m in MlflowClient(tracking_uri=uri).get_metric_history(run_id, "zf.epoch/energy_j")]


@pytest.mark.parametrize("mode", ["drop", "hang"])
def test_an_outage_in_mid_run_stalls_training_for_two_seconds_at_most(
    mode: str, proxy: Proxy, server_on_sqlite: str, job: Job, tmp_path: Path
) -> None:
    brief.recur(proxy.address, tmp_path, job=job)
    with brief.opened(proxy.address, tmp_path, job) as ledger:
        number = ledger.begin()
        attempt = ledger.decided(decision(number, batch_size=32, explores=True), {})
        proxy.mode = mode
        observed = observation(number, batch_size=32, energy_j=7777.0)
        stalled_s = 0.0
        for step in (1, 2, 3):
            began = time.monotonic()
            ledger.epoch(attempt, EpochReport(step, energy_j=1.0 * step, time_s=1.0))
            stalled_s += time.monotonic() - began
            time.sleep(0.2)
        began = time.monotonic()
        ledger.observed(attempt, observed)
        ledger.ended(number, [observed])
        stalled_s += time.monotonic() - began
    assert stalled_s < 2.0 + GRACE_S
    assert direct(job, server_on_sqlite).open_claims().keys() == {number}

    proxy.mode = "pass"
    done = brief.recur(proxy.address, tmp_path, job=job)
    ledger_now = direct(job, server_on_sqlite)
    assert [o.order for o in ledger_now.observations()] == [(1, 1), (number, 1), (done.number, 1)]
    assert [o.energy_j for o in ledger_now.observations()].count(7777.0) == 1
    assert epochs_written(server_on_sqlite, attempt) == [1, 2, 3]
    assert ledger_now.open_claims() == {}
    assert ledger_now.verify()[0]


def test_after_a_short_outage_the_same_run_delivers(
    proxy: Proxy, server_on_sqlite: str, job: Job, tmp_path: Path
) -> None:
    def outage(epoch: int) -> None:
        proxy.mode = {1: "drop", 2: "drop", 3: "pass"}[epoch]
        time.sleep(0.5)

    done = brief.recur(proxy.address, tmp_path, job=job, trainer=brief.BriefTrainer(between=outage))
    ((attempt, observed),) = done.attempts
    for _ in range(100):
        if direct(job, server_on_sqlite).observations():
            break
        time.sleep(0.1)
    assert direct(job, server_on_sqlite).observations() == (observed,)
    assert epochs_written(server_on_sqlite, attempt.id) == [1, 2, 3]


def test_a_slow_server_is_waited_for(proxy: Proxy, server_on_sqlite: str, job: Job, tmp_path: Path) -> None:
    brief.recur(proxy.address, tmp_path, job=job)
    proxy.mode, proxy.delay_s = "delay", 0.05
    done = brief.recur(proxy.address, tmp_path, job=job)
    assert not done.attempts[0][0].decision.degraded
    assert [o.order for o in direct(job, server_on_sqlite).observations()] == [(1, 1), (2, 1)]


@pytest.mark.parametrize("mode", ["drop", "hang"])
def test_dead_at_decision_time_the_default_batch_size_runs_and_is_numbered_on_delivery(
    mode: str, proxy: Proxy, server_on_sqlite: str, job: Job, tmp_path: Path
) -> None:
    brief.recur(proxy.address, tmp_path, job=job)
    proxy.mode = mode
    began = time.monotonic()
    with brief.opened(proxy.address, tmp_path, job) as ledger:
        ledger.sweep()
        steps = brief.RecordingSteps(job, ledger, brief.BriefTrainer(energy_j=7776.0), tmp_path / "acknowledged")
        attempt = steps.decide(steps.begin(), ())
        assert time.monotonic() - began < 30.0
        assert (attempt.decision.batch_size, attempt.decision.degraded) == (job.default_batch_size, True)
        observed = steps.train(attempt)
        steps.observe(attempt, observed)
        steps.end(attempt.decision.recurrence, (observed,))
    direct(job, server_on_sqlite).begin()  # meanwhile another machine takes the number that was guessed

    proxy.mode = "pass"
    done = brief.recur(proxy.address, tmp_path, job=job)
    ledger_now = direct(job, server_on_sqlite)
    read = {o.recurrence: o.energy_j for o in ledger_now.observations()}
    assert sorted(read) == [1, 3, done.number]
    assert read[3] == 7777.0
    (run,) = MlflowClient(tracking_uri=server_on_sqlite).search_runs(
        [ledger_now.experiment_id], "tags.`zf.degraded` = 'true'"
    )
    assert (run.data.tags["zf.recurrence"], run.info.status) == ("3", "FINISHED")


def test_a_flow_whose_mlflow_is_dead_trains_at_the_default_and_ends_well(tmp_path: Path, prefect_server: None) -> None:
    from zeus_flows.orchestration.recurrence_flow import recurrence

    job_file = write_job(tmp_path / "job.yaml", tracking_uri=f"http://127.0.0.1:{free_port()}")
    done = recurrence(str(job_file))
    assert done.converged
    assert [(a.decision.batch_size, a.decision.degraded) for a, _ in done.attempts] == [(128, True)]


def test_a_planted_secret_appears_nowhere(
    server_with_authentication: str, job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with proxy_to(server_with_authentication) as proxy:
        uri = f"http://{USER}:{PASSWORD}@127.0.0.1:{proxy.port}"
        brief.recur(uri, tmp_path, job=job)
        with brief.opened(uri, tmp_path, job) as ledger:
            number = ledger.begin()
            attempt = ledger.decided(decision(number), {})
            proxy.mode = "drop"
            ledger.epoch(attempt, EpochReport(1, energy_j=1.0, time_s=1.0))
            ledger.observed(attempt, observation(number))
            with pytest.raises(StoreUnavailable) as away:
                direct(job, uri).history()
            assert PASSWORD not in str(away.value)
            assert ledger.sweep().buried == ()
        with pytest.raises(StoreDenied) as denied:
            direct(job, server_with_authentication.replace("//", "//nobody:planted-Secret-54321@")).begin()
        assert "planted" not in str(denied.value)
        assert "MLFLOW_TRACKING_PASSWORD" in str(denied.value)
    client = MlflowClient(tracking_uri=server_with_authentication)
    experiments = [e.experiment_id for e in client.search_experiments() if e.name.startswith(job.name)]
    written = [run.to_dictionary() for run in client.search_runs(experiments, run_view_type=ViewType.ALL)]
    assert written
    kept = b"".join(path.read_bytes() for path in (tmp_path / "state").iterdir())
    assert b"observed" in kept
    for where, text in (("tags and params", str(written)), ("logs", caplog.text), ("the outbox", kept.decode("latin"))):
        assert PASSWORD not in text, f"in {where}"
        assert "planted" not in text, f"in {where}"
