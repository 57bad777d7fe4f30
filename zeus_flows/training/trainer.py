"""Runs a job file's train function in this process."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeus_flows.core.records import Decision, EnergySource, Gpu, Job, Observation, Outcome, PowerProfile
from zeus_flows.errors import ConfigError
from zeus_flows.gpu.address import ZeusdAddress
from zeus_flows.gpu.group import Gpus
from zeus_flows.gpu.open import open_gpus
from zeus_flows.gpu.simulated import Workload
from zeus_flows.job import JobFile
from zeus_flows.ledger.protocol import EpochReport
from zeus_flows.settings import Settings
from zeus_flows.training.session import Session

TrainFunction = Callable[..., object]


class AttemptFailed(Exception):
    """Carries the observation of an attempt that an exception ended; `__cause__` is that exception."""

    def __init__(self, observation: Observation) -> None:
        super().__init__(observation.detail)
        self.observation = observation


class LocalTrainer:
    """Trains in this process, on the GPUs the job file names.

    Args:
        job_file: The job.
        settings: Where the power journal is, which GPUs are visible.

    Raises:
        NoDevice: there is no GPU and none was asked to be simulated.
        ConfigError: the train function cannot be imported.
    """

    def __init__(self, job_file: JobFile, settings: Settings) -> None:
        self._job_file, self._settings = job_file, settings
        self._function = load_function(job_file.train.function)
        with self._open(job_file.default_batch_size) as gpus:
            self.gpu: Gpu = gpus.gpu
            self.energy_source: EnergySource = gpus.energy_source
            self.power_limits_w: tuple[float, ...] = gpus.limits_w

    def train(
        self, job: Job, decision: Decision, profile: PowerProfile | None, report: Callable[[EpochReport], None]
    ) -> Observation:
        """Train at the decided batch size and return how it went.

        Raises:
            AttemptFailed: the train function raised; the arm is not blamed.
        """
        with self._open(decision.batch_size) as gpus:
            session = Session(self._job_file, job, decision, gpus, known_profile=profile, report=report)
            try:
                self._function(session, **self._job_file.train.parameters)
                return session.observation()
            except BaseException as error:
                if _is_out_of_memory(error):
                    return session.failed(
                        Outcome.OUT_OF_MEMORY, f"batch size {decision.batch_size} does not fit {gpus.gpu.key}"
                    )
                detail = f"{type(error).__name__}: {error}"
                raise AttemptFailed(session.failed(Outcome.FAILED, detail)) from error

    def _open(self, batch_size: int) -> Gpus:
        return open_gpus(
            self._job_file.device,
            workload=Workload(**self._job_file.simulation.model_dump()),
            batch_size=batch_size,
            samples_per_epoch=None,
            state_dir=self._settings.state_dir,
            visible=self._settings.cuda_visible_devices,
            shared=self._job_file.shared_gpu,
            zeusd=ZeusdAddress(
                self._settings.zeusd_socket, self._settings.zeusd_host_port, self._settings.zeusd_token
            ),
        )


def load_function(spec: str, *, beside: Path | None = None) -> TrainFunction:
    """Return the function that `module:function` names; modules beside the job file can be named too.

    Raises:
        ConfigError: there is no such module or function; the text says which.
    """
    module_name, _, function_name = spec.partition(":")
    for place in (beside, Path.cwd()):
        if place is not None and str(place) not in sys.path:
            sys.path.insert(0, str(place))
    try:
        module: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.split(".")[0] and error.name != module_name:
            raise ConfigError(f"train.function: {module_name} needs a module that is missing: {error.name}") from None
        raise ConfigError(
            f"train.function: there is no module {module_name!r}; "
            "install it, or run from the folder that holds it (or set PYTHONPATH)"
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        close = difflib.get_close_matches(function_name, functions, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise ConfigError(f"train.function: {module_name} has no function {function_name!r}{hint}")
    loaded: TrainFunction = function
    return loaded


def _is_out_of_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)
