"""Runs a job file's train function in this process."""

from __future__ import annotations

import difflib
import gc
import importlib
import importlib.metadata
import inspect
import json
import logging
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from zeus_flows.core.attempt import AttemptFailed, EpochReport
from zeus_flows.core.job import Job
from zeus_flows.core.overheads import NOTHING, Overheads
from zeus_flows.core.power_profile import Gpu, Knob, PowerProfile
from zeus_flows.core.records import Decision, EnergySource, Observation, Outcome, unobserved
from zeus_flows.core.text import shown
from zeus_flows.ending import tidied
from zeus_flows.errors import CommandOutOfMemory, ConfigError, DeviceError, DeviceLost
from zeus_flows.gpu.address import ZeusdAddress
from zeus_flows.gpu.group import Gpus
from zeus_flows.gpu.host import open_host_meter
from zeus_flows.gpu.meter import update_period_s
from zeus_flows.gpu.open_gpus import open_gpus, untunable
from zeus_flows.gpu.simulated import Workload
from zeus_flows.job_file import JobFile
from zeus_flows.masking import masked
from zeus_flows.settings import Settings
from zeus_flows.training.checkpoint import Checkpoints
from zeus_flows.training.failures import no_exits, presentable, text_of, traceback_text, what_happened
from zeus_flows.training.forms.command import Command, find_command
from zeus_flows.training.forms.ranks import RankedFunction
from zeus_flows.training.keeping import Keeper
from zeus_flows.training.profiler import LEAST_S
from zeus_flows.training.session import Session

log = logging.getLogger(__name__)

TrainFunction = Callable[..., object]
#: Runs something; returns what that returned, its seconds, and its joules where they were measured, else 0.
Measure = Callable[[Callable[[], object]], tuple[object, float, float]]

_UPDATES = 50


class LocalTrainer:
    """Trains in this process, on the GPUs the job file names.

    Args:
        job_file: The job.
        settings: Where the power journal is, which GPUs are visible.
        tracking_uri: Where MLflow runs go, whatever job file and environment say.

    Raises:
        NoDevice: there is no GPU and none was asked to be simulated.
        ConfigError: the train function cannot be imported.
    """

    def __init__(self, job_file: JobFile, settings: Settings, *, tracking_uri: str | None = None) -> None:
        self._job_file, self._settings = job_file, settings
        self._tracking_uri = settings.tracking(tracking_uri, job_file.tracking_uri)
        self._training = find_training(job_file)
        self.code_revision = code_revision(self._training)
        self._checkpoints: dict[tuple[int, int], Checkpoints] = {}
        self._host = open_host_meter() if job_file.host_power_w == "measured" else None
        if job_file.host_power_w == "measured" and self._host is None:
            log.warning(
                "host_power_w: measured, but RAPL cannot be read here (mostly root may): the machine beside its GPUs "
                "counts for nothing; state its watts instead"
            )
        with self._open(job_file.default_batch_size) as gpus:
            self.gpu: Gpu = gpus.gpu
            self.energy_source: EnergySource = gpus.energy_source
            self.untunable = untunable(gpus)
            limited = gpus.control.can_set and gpus.control.knob is Knob.POWER_LIMIT
            self.power_limits_w: tuple[float, ...] = gpus.control.settings if limited else ()
            self._least_span_s = least_span_s(gpus)

    def train(
        self,
        job: Job,
        decision: Decision,
        profile: PowerProfile | None,
        report: Callable[[EpochReport], None],
        *,
        overheads: Overheads = NOTHING,
        attempt_id: str = "",
    ) -> Observation:
        """Train at the decided batch size and return how it went.

        Raises:
            AttemptFailed: the train function raised; the arm is not blamed.
        """
        key = (decision.recurrence, decision.attempt)
        checkpoints = self._checkpoints.get(key)
        if checkpoints is None:
            checkpoints = self._checkpoints[key] = Checkpoints(self._settings.state_dir / "checkpoints")
        began_after = checkpoints.progress.epoch if checkpoints.progress is not None else 0
        try:
            opened = self._open(decision.micro)
        except DeviceError as error:
            never_began = unobserved(
                decision,
                gpu=self.gpu,
                energy_source=self.energy_source,
                fingerprint=job.fingerprint,
                detail=what_happened(error),
            )
            raise AttemptFailed(never_began) from error
        keeper = Keeper(self._settings.state_dir / "models", lambda: self._ledger_key(job), attempt_id)
        with opened as gpus:
            session = Session(
                self._job_file,
                job,
                decision,
                gpus,
                known_profile=profile,
                overheads=overheads,
                report=report,
                checkpoints=checkpoints,
                keeper=keeper,
                made_with=_made_with(gpus),
                least_span_s=self._least_span_s,
                host_energy_j=None if self._host is None else self._host.energy_j,
            )
            try:
                with tidied(), session.as_current(), no_exits():
                    self._call(session, checkpoints, attempt_id, gpus)
                observation = session.observation()
                self._close(keeper, observation)
            except BaseException as error:
                keeper.close(converged=False)
                if _is_out_of_memory(error):
                    observation = session.failed(
                        Outcome.OUT_OF_MEMORY, f"{_at_once(decision)} does not fit {gpus.gpu.key}"
                    )
                    _let_go_of(error)
                else:
                    failed = session.failed(
                        Outcome.FAILED, what_happened(error), traceback_text(error, _in_training(error))
                    )
                    checkpoints.profile = failed.profile or checkpoints.profile
                    saved = checkpoints.progress.epoch if checkpoints.progress is not None else 0
                    resumable = isinstance(error, Exception) and not isinstance(error, DeviceLost)
                    resumable = resumable and saved > began_after
                    if not resumable:
                        self._forget(key)
                    _let_go_of(error)
                    raise AttemptFailed(failed, resumable=resumable) from presentable(error)
        self._forget(key)
        return observation

    def _close(self, keeper: Keeper, observation: Observation) -> None:
        """Let the model be sent where the attempt reached the target; say where there is none."""
        if self._job_file.model is not None:
            if not observation.converged:
                log.info("no model is kept: the target was not reached; the champion stays what it is")
            elif not keeper.holds:
                log.warning(
                    "the target was reached and no model was kept: %s",
                    "call session.keep(model) in the train function"
                    if self._job_file.train.command is None
                    else f"the command wrote nothing to model.path {self._job_file.model.path}; it is stopped at the "
                    "target, so let it save before it prints the metric",
                )
        keeper.close(converged=observation.converged)

    def _ledger_key(self, job: Job) -> str:
        from zeus_flows.ledger.mlflow.address import ledger_key

        return ledger_key(self._tracking_uri, job.name)

    def _call(self, session: Session, checkpoints: Checkpoints, attempt_id: str, gpus: Gpus) -> None:
        """Train with whatever form the job has."""
        match self._training:
            case Command() as command:
                from zeus_flows.training.forms.script_runs import attempt_run  # brings MLflow

                run = attempt_run(attempt_id, self._tracking_uri)
                command(session, run=run, keep=checkpoints.folder, gpus=gpus)
            case RankedFunction() as ranked:
                ranked(session)
            case function:
                function(session, **self._job_file.train.parameters)

    def measure(self, evaluate: Callable[[], object]) -> tuple[object, float, float]:
        """Run an evaluation outside of an attempt; return what it returned, its seconds and its joules."""
        try:
            opened = self._open(self._job_file.default_batch_size)
        except DeviceError:
            return timed(evaluate)
        with opened as gpus:
            start = gpus.mark()
            returned = evaluate()
            gpus.evaluated()
            span = gpus.since(start)
        return returned, span.time_s, span.energy_j if span.complete else 0.0

    def _forget(self, key: tuple[int, int]) -> None:
        self._checkpoints.pop(key).close()

    def _open(self, batch_size: int) -> Gpus:
        return open_gpus(
            self._job_file.device,
            workload=Workload(**self._job_file.simulation.model_dump()),
            batch_size=batch_size,
            samples_per_epoch=None,
            state_dir=self._settings.state_dir,
            visible=self._settings.cuda_visible_devices,
            shared=self._job_file.shared_gpu,
            count=self._job_file.gpus,
            knob=self._job_file.knob,
            locked_before_mhz=self._job_file.locked_clocks_mhz,
            zeusd=ZeusdAddress(self._settings.zeusd_socket, self._settings.zeusd_host_port, self._settings.zeusd_token),
        )


def _at_once(decision: Decision) -> str:
    """Return what goes through the GPUs at once, for people."""
    whole = f"batch size {decision.batch_size}"
    return whole if decision.micro_batch_size is None else f"{whole} in micro-batches of {decision.micro}"


def timed(evaluate: Callable[[], object]) -> tuple[object, float, float]:
    """Run an evaluation by the clock alone: a `Measure` without joules."""
    began = time.monotonic()
    return evaluate(), time.monotonic() - began, 0.0


def load_function(spec: str, *, beside: Path | None = None, key: str = "train.function") -> TrainFunction:
    """Return the function that `module:function` names, by the job file's `key`; modules beside the file count too.

    Raises:
        ConfigError: there is no such module or function; the text says which.
    """
    module_name, _, function_name = spec.partition(":")
    for place in (beside, Path.cwd()):
        if place is not None and str(place) not in sys.path:
            sys.path.insert(0, str(place))
    try:
        with no_exits():
            module: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.split(".")[0] and error.name != module_name:
            raise ConfigError(f"{key}: {module_name} needs a module that is missing: {error.name}") from None
        raise ConfigError(
            f"{key}: there is no module {module_name!r}; "
            "install it, or run from the folder that holds it (or set PYTHONPATH)"
        ) from None
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{key}: {module_name} cannot be imported: {what_happened(error)} ({last.filename}:{last.lineno})"
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        close = difflib.get_close_matches(function_name, functions, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise ConfigError(f"{key}: {module_name} has no function {function_name!r}{hint}")
    loaded: TrainFunction = function
    return loaded


def check_call(function: TrainFunction, parameters: Mapping[str, object], *, key: str, first: str) -> None:
    """See whether a function takes what the job file calls it with, before anything runs.

    Raises:
        ConfigError: it does not; the text says which parameter, by the job file's `key`, and what was probably meant.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some are written in C, and only a call can tell
        return
    name = getattr(function, "__name__", "the function")
    takes = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for stray in () if takes_any else [parameter for parameter in parameters if parameter not in takes]:
        close = difflib.get_close_matches(stray[:64], takes, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(takes[1:]) or 'none'}"
        raise ConfigError(f"{key}: {name} takes no {shown(stray)}; {hint}")
    try:
        signature.bind(None, **parameters)
    except TypeError as error:
        raise ConfigError(f"{key}: {name}({first}, ...) cannot be called with these: {error}") from None


def least_span_s(gpus: Gpus) -> float:
    """Return how long a span must be to be believed: fifty updates of a GPU's counter."""
    if gpus.energy_source is not EnergySource.MEASURED:
        return LEAST_S
    period_s = None
    if gpus.sensor == "counter":
        period_s = update_period_s(gpus.devices[0].energy_j, time.monotonic, time.sleep)
    return math.inf if period_s is None else max(LEAST_S, _UPDATES * period_s)


def _made_with(gpus: Gpus) -> str:
    """Return the major versions that a measured profile depends on; a model's depends on none."""
    if gpus.energy_source is not EnergySource.MEASURED:
        return ""
    import pynvml

    torch = importlib.metadata.version("torch").split(".")[0]
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion()).split(".")[0]
    except pynvml.NVMLError:
        driver = "unknown"
    return f"torch {torch}, driver {driver}"


def find_training(job_file: JobFile) -> TrainFunction | Command | RankedFunction:
    """Return what a job file names: a function, one that several GPUs run together, or a command.

    Raises:
        ConfigError: there is no such thing; the text says what is missing.
    """
    if job_file.train.function is None:
        return find_command(job_file)
    function = load_function(job_file.train.function)
    check_call(function, job_file.train.parameters, key="train.parameters", first="session")
    if (job_file.gpus or 1) == 1 or not job_file.train.torchrun:
        return function
    try:
        json.dumps(job_file.train.parameters)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"train.parameters: cannot be given to the ranks of several gpus: {error}") from None
    return RankedFunction(job_file.train, job_file.gpus or 1, function)


def _folder_of(training: TrainFunction | Command | RankedFunction) -> Path | None:
    """Return the folder whose code trains; None where that cannot be told."""
    if isinstance(training, Command):
        return (training.folder / training.script).resolve().parent if training.script else training.folder
    function = training.function if isinstance(training, RankedFunction) else training
    try:
        return Path(inspect.getsourcefile(function) or "").resolve().parent
    except (OSError, TypeError):
        return None


def code_revision(training: TrainFunction | Command | RankedFunction) -> str:
    """Return the git commit that the training's file is at, with `-dirty` where files differ; else nothing.

    It is recorded with every attempt, so that two runs whose code differs can be told apart.
    """
    folder = _folder_of(training)
    if folder is None:
        return ""
    try:
        words = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        found = subprocess.run(words, capture_output=True, text=True, timeout=5, check=False)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether the GPU ran out of memory. The train function may have wrapped the exception."""
    if isinstance(error, CommandOutOfMemory):
        return True
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    seen: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if seen is None or isinstance(seen, torch.OutOfMemoryError):
            break
        if isinstance(seen, RuntimeError) and any(text in text_of(seen) for text in _OUT_OF_MEMORY):
            return True
        seen = seen.__cause__
    return isinstance(seen, torch.OutOfMemoryError)


#: Exceptions that one may have wrapped; a chain may be a circle.
_LONGEST_CHAIN = 20
#: What CUDA's libraries say where torch has no exception of its own for it.
_OUT_OF_MEMORY = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def _in_training(error: BaseException) -> TracebackType | None:
    """Return the part of a traceback that begins in the train function; None where it was raised elsewhere."""
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code is not LocalTrainer._call.__code__:
        step = step.tb_next
    return None if step is None else step.tb_next


def train_traceback(error: BaseException) -> str | None:
    """Return an exception's traceback from the train function on; None where it was raised elsewhere."""
    began = _in_training(error)
    return None if began is None else masked("".join(traceback.format_exception(type(error), error, began))).rstrip()


def _let_go_of(error: BaseException) -> None:
    """Free the memory that the train function's frames hold, such as its model: the next attempt needs it."""
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
