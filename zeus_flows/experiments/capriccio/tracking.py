"""An experiment in MLflow: one run that holds the series, and one run per slice under it.

| run | tag `zf.kind` | holds |
| --- | --- | --- |
| the experiment's | `experiment` | series over slices per contender, results, figures, the report, the dataset |
| a slice's | `slice` | its dataset input (digest, rows, span), label balance, and what each contender made of it |

Only these runs carry dataset inputs: on the attempts' runs they would slow every search (mlflow#15231). Metrics are
named `zf.cost_j/<contender>`, at step = slice, so that charts group by what is measured.

Of an experiment there is one such run, and of a slice one, however many processes begin at once: the MLflow experiment
`<experiment>.experiment` names the former, and creating an experiment is a compare-and-set; write-once params of that
run name the latter.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mlflow.entities import Dataset as MlflowDataset
from mlflow.entities import DatasetInput, InputTag, Metric

from zeus_flows.core.json import to_text
from zeus_flows.errors import ConfigError
from zeus_flows.experiments.capriccio.datasets import Dataset
from zeus_flows.experiments.capriccio.file import ExperimentFile
from zeus_flows.experiments.capriccio.results import SliceOutcome
from zeus_flows.experiments.capriccio.slices import Slice
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.names import RunKind
from zeus_flows.ledger.mlflow.query import having

_SEARCH_AT_ONCE: Final = 1000


class Tracking:
    """The runs of one experiment.

    Args:
        store: MLflow.
        file: What was asked for.
        dataset: The data.
        slices: Its slices.

    Raises:
        ConfigError: an experiment of this name was begun with other data, slices, model or job, or a contender of
            that name with another policy; or its run was deleted.
    """

    def __init__(self, store: Store, file: ExperimentFile, dataset: Dataset, slices: tuple[Slice, ...]) -> None:
        self._store, self._file, self._dataset = store, file, dataset
        self.uri = str(store.client.tracking_uri)
        self.experiment_id = store.experiment_id(file.name)
        self.run_id = self._find_run()
        self._once(names.DIGEST, file.digest(dataset), "was begun with other data, slices, model or job")
        for name, contender in file.contenders.items():
            settings = json.dumps(contender.model_dump(mode="json"), sort_keys=True)  # compared as text for ever
            self._once(names.contender(name), settings, f"was begun with another policy for {name}")
        store.log(self.run_id, params={names.SLICES: str(len(slices)), names.ROWS: str(len(dataset))})
        found = self._search(RunKind.SLICE)
        self._slices = {int(run.data.tags[names.SLICE]): run for run in found}

    @property
    def written(self) -> int:
        """How many slices have their run."""
        return sum(run.info.status == "FINISHED" for run in self._slices.values())

    def write(self, part: Slice, outcomes: Mapping[str, SliceOutcome]) -> None:
        """Write a slice's run and its points of the series, unless an earlier process has."""
        standing = self._slices.get(part.number)
        if standing is not None and standing.info.status == "FINISHED":
            return
        if standing is None:
            tags = {
                names.KIND: RunKind.SLICE,
                names.SLICE: str(part.number),
                names.SLICE_DAY: part.day.isoformat(),
                "mlflow.parentRunId": self.run_id,
            }
            candidate = self._store.create_run(self.experiment_id, name=f"slice {part.number} · {part.day}", tags=tags)
        else:
            candidate = str(standing.info.run_id)
        run_id = self._store.set_once(self.run_id, names.slice_run(part.number), candidate)
        if run_id != candidate and standing is None:  # another's, that was found, is its maker's to delete
            self._store.delete(candidate)
        digest = hashlib.sha256(f"{self._dataset.digest} {part.key}".encode()).hexdigest()[:16]
        profile = {"num_rows": part.rows, "first": str(part.began), "last": str(part.ended), "overlap": part.overlap}
        self._log_input(run_id, f"{self._dataset.name} slice {part.number}", digest, profile)
        values: dict[str, float | None] = {
            names.ROWS: float(part.rows),
            names.POSITIVE_SHARE: part.positive,
            names.MAJORITY_ACCURACY: part.majority,
            names.OVERLAP: part.overlap,
        }
        for name, outcome in outcomes.items():
            values |= {names.of_contender(measure, name): value for measure, value in outcome.measures().items()}
        for target in (run_id, self.run_id):
            self._store.log(target, metrics=_metrics(values, step=part.number))
        self._store.end(run_id)
        self._slices[part.number] = self._store.run(run_id)

    def results(self, values: Mapping[str, float], artifacts: Sequence[Path], tags: Mapping[str, str]) -> None:
        """Write what came out, and end the experiment's run."""
        finite = {name: value for name, value in values.items() if abs(value) < float("inf")}
        self._store.log(self.run_id, metrics=_metrics(finite, step=0), tags=tags)
        for path in artifacts:
            self._store.client.log_artifact(self.run_id, str(path))
        self._store.end(self.run_id)

    def _find_run(self) -> str:
        """Return the experiment's run; of those that several processes make at once, the same one to all."""
        companion = f"{self._file.name}.experiment"
        standing = self._store.root(companion)
        if standing is None:
            # Nothing names it yet: an earlier version, or a process that was killed at this point, may have made it.
            nameless = self._search(RunKind.EXPERIMENT)
            candidate = str(nameless[-1].info.run_id) if nameless else self._begin()
            standing = self._store.name_root(companion, candidate)
            if standing[1] != candidate and not nameless:
                self._store.delete(candidate)
        run = self._store.run(standing[1])
        if run.info.lifecycle_stage != "active":
            raise ConfigError(
                f"the run of the experiment {self._file.name} was deleted; bring it back with "
                f"`mlflow runs restore --run-id {standing[1]}`, or give this one another name"
            )
        return standing[1]

    def _begin(self) -> str:
        """Create a run for the experiment, with its dataset."""
        tags = {names.KIND: RunKind.EXPERIMENT, names.MALFORMED_LINES: str(self._dataset.malformed.bad)}
        run_id = self._store.create_run(self.experiment_id, name=self._file.name, tags=tags)
        self._log_input(run_id, self._dataset.name, self._dataset.digest, _profile(self._dataset))
        return run_id

    def _search(self, kind: RunKind) -> list[Any]:
        runs = self._store.client.search_runs(
            [self.experiment_id], having({names.KIND: kind}), max_results=_SEARCH_AT_ONCE
        )
        return sorted(runs, key=lambda run: int(run.info.start_time), reverse=True)

    def _once(self, name: str, value: str, problem: str) -> None:
        if self._store.set_once(self.run_id, name, value) != value:
            raise ConfigError(f"the experiment {self._file.name} {problem}; give this one another name")

    def _log_input(self, run_id: str, name: str, digest: str, profile: Mapping[str, Any]) -> None:
        dataset = MlflowDataset(
            name=name,
            digest=digest,
            source_type="local",
            source=to_text({"name": self._dataset.name}),
            profile=to_text(profile),
        )
        tag = InputTag("mlflow.data.context", "training")
        self._store.log_input(run_id, DatasetInput(dataset, [tag]))


def _profile(dataset: Dataset) -> dict[str, Any]:
    return {
        "num_rows": len(dataset),
        "first": str(dataset.times[0]),
        "last": str(dataset.times[-1]),
        "positive_share": float(dataset.labels.mean()),
        "malformed_lines": dataset.malformed.bad,
    }


def _metrics(values: Mapping[str, float | None], *, step: int) -> list[Metric]:
    now_ms = int(time.time() * 1000)
    return [Metric(name, value, now_ms, step) for name, value in values.items() if value is not None]
