"""The job file: what a user writes, validated, with file and line in every error."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator

from zeus_flows.core.job import Drift, Job, Mode, Selector, WindowOf
from zeus_flows.core.policy import POLICIES
from zeus_flows.core.records import EnergySource
from zeus_flows.yaml_file import Kind, Section, one_of

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
FUNCTION_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
SimulatedGpu = Literal["v100", "p100", "a40", "rtx6000"]
SIMULATED_GPUS: tuple[SimulatedGpu, ...] = get_args(SimulatedGpu)
DEVICES = ("auto", "nvml", "zeusd", *(f"simulated-{gpu}" for gpu in SIMULATED_GPUS))


class Target(Section):
    """When a model is good enough. Which way is better has no default: a guess would train the wrong model."""

    metric: str = Field(min_length=1, max_length=64)
    value: float = Field(allow_inf_nan=False)
    better: Literal["higher", "lower"]

    def reached(self, value: float) -> bool:
        """Whether a metric value meets the target; NaN never does.

        >>> Target(metric="accuracy", value=0.9, better="higher").reached(0.91)
        True
        """
        return value >= self.value if self.better == "higher" else value <= self.value


class PowerLimitSection(Section):
    """How the power limit is chosen and profiled."""

    choose_by: Selector = Selector.COST
    slowdown: float = Field(default=1.1, ge=1.0)
    limits: Literal["all"] | list[Annotated[float, Field(gt=0)]] = "all"
    profile_all_limits: bool = False
    profile_seconds: float = Field(default=5.0, gt=0)
    warmup_seconds: float = Field(default=1.0, ge=0)


class LearningRate(Section):
    """The learning rate at the default batch size, and how it follows the batch size."""

    base: float = Field(default=1e-3, gt=0)
    scaling: Literal["sqrt", "linear", "none"] = "sqrt"

    def at(self, batch_size: int, default_batch_size: int) -> float:
        """Return the learning rate for a batch size (square root for adaptive optimizers).

        >>> LearningRate(base=0.01, scaling="sqrt").at(64, 256)
        0.005
        """
        ratio = batch_size / default_batch_size
        return float(self.base * {"sqrt": ratio**0.5, "linear": ratio, "none": 1.0}[self.scaling])


class TrainSection(Section):
    """The train function, as `module:function`, and what it is called with.

    `retries` is how often a training that broke is tried again from its last checkpoint; without one it is not.
    """

    function: str = Field(pattern=FUNCTION_PATTERN)
    parameters: dict[str, Any] = Field(default_factory=dict)
    retries: int = Field(default=2, ge=0)


class GateSection(Section):
    """The drift gate: a function, as `module:function`, that evaluates the newest model on the new slice.

    Where that meets the target nothing is trained, unless the model is `max_age` recurrences old.
    """

    function: str = Field(pattern=FUNCTION_PATTERN)
    parameters: dict[str, Any] = Field(default_factory=dict)
    max_age: int | None = Field(default=None, ge=1)


class Simulation(Section):
    """The simulated GPU's load, for a job that was never measured; `zeus_flows.gpu.simulated.Workload` has the laws.

    An epoch takes `seconds_per_epoch * (1 + half_batch / b)` at full clock and batch size b; each evaluation
    `evaluation_seconds` more, a tenth of `seconds_per_epoch` unless stated.
    """

    seconds_per_epoch: float = Field(default=60.0, gt=0)
    half_batch: float = Field(default=250.0, ge=0)
    utilisation: float = Field(default=0.75, gt=0, le=1)
    least_utilisation: float = Field(default=0.1, gt=0, le=1)
    saturated_power_w: float | None = Field(default=None, gt=0)
    evaluation_seconds: float | None = Field(default=None, ge=0)


class Prior(Section):
    """What is believed of every batch size's cost before the first run (Algorithm 2)."""

    mean_j: float = Field(gt=0)
    standard_deviation_j: float = Field(gt=0)


class JobFile(Section):
    """A job as its user writes it. `zeus-flows init` writes a commented one."""

    name: str
    version: str = "1"
    mode: Mode = Mode.FULL
    device: str = "auto"
    shared_gpu: bool = False
    batch_sizes: list[Annotated[int, Field(gt=0)]] = Field(min_length=1)
    default_batch_size: int = Field(gt=0)
    target: Target
    max_epochs: int = Field(gt=0)
    stop_at_target: bool = True
    eta: float = Field(default=0.5, ge=0, le=1)
    beta: float = Field(default=2.0, gt=1)
    window: int | None = Field(default=None, ge=2)
    window_of: WindowOf = WindowOf.ARM
    drift: Drift = Drift.RESET
    policy: str = "thompson"
    translate_gpus: bool = True
    max_attempts: int = Field(default=4, ge=1)
    exploration_budget: float | None = Field(default=None, ge=0)
    deadline_seconds: float | None = Field(default=None, gt=0)
    control: int | None = Field(default=None, ge=2)
    host_power_w: Annotated[float, Field(ge=0, allow_inf_nan=False)] | Literal["measured"] = 0.0
    prior: Prior | None = None
    seed: int = 0
    power_limit: PowerLimitSection = PowerLimitSection()
    optimizer: str = "adam"
    learning_rate: LearningRate = LearningRate()
    train: TrainSection
    gate: GateSection | None = None
    tracking_uri: str | None = None
    simulation: Simulation = Simulation()

    @field_validator("name")
    @classmethod
    def _name_is_plain(cls, value: str) -> str:
        if not re.fullmatch(NAME_PATTERN, value):
            raise ValueError("must be 1 to 64 letters, digits, '_', '.' or '-', and start with a letter or digit")
        if value.endswith(".ledger"):
            raise ValueError("must not end in '.ledger', which names the experiment that holds claims")
        return value

    @field_validator("version", mode="before")
    @classmethod
    def _version_may_be_a_number(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value

    @field_validator("mode", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML 1.1 reads a bare `off` as false

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, value: str) -> str:
        return one_of(value, DEVICES)

    @field_validator("policy")
    @classmethod
    def _policy_is_known(cls, value: str) -> str:
        return one_of(value, tuple(POLICIES))

    @field_validator("batch_sizes")
    @classmethod
    def _batch_sizes_ascend(cls, value: list[int]) -> list[int]:
        if len(set(value)) != len(value):
            raise ValueError("has a batch size twice")
        return sorted(value)

    @field_validator("default_batch_size")
    @classmethod
    def _default_is_an_arm(cls, value: int, info: ValidationInfo) -> int:
        arms = info.data.get("batch_sizes")
        if arms and value not in arms:
            raise ValueError(f"must be one of batch_sizes {arms}")
        return value

    @property
    def fingerprint(self) -> str:
        """Hash of what makes observations comparable; a new one starts a new drift window."""
        comparable = [
            self.target.model_dump(mode="json"),
            self.optimizer,
            self.learning_rate.model_dump(mode="json"),
            self.version,
        ]
        return hashlib.sha256(json.dumps(comparable, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def comparable(self) -> dict[str, str]:
        """What the fingerprint is made of, in words."""
        target, rate = self.target, self.learning_rate
        sign = ">=" if target.better == "higher" else "<="
        return {
            "target": f"{target.metric} {sign} {target.value:g}",
            "optimizer": self.optimizer,
            "learning_rate": f"{rate.base:g}, scaling {rate.scaling}",
            "version": self.version,
        }

    def overridden(self, *, simulate: SimulatedGpu | None = None, seed: int | None = None) -> JobFile:
        """Return the job with what flags or flow parameters say instead of the file."""
        changes: dict[str, object] = {}
        if simulate is not None:
            changes["device"] = f"simulated-{simulate}"
        if seed is not None:
            changes["seed"] = seed
        return self.model_copy(update=changes)

    @property
    def energy_source(self) -> EnergySource:
        """Where the job's joules come from, by this file alone; a GPU may turn out to have no sensor."""
        if self.device.startswith("simulated-"):
            return EnergySource.NONE if self.shared_gpu else EnergySource.SIMULATED
        return EnergySource.NONE if self.shared_gpu else EnergySource.MEASURED

    def core(self, energy_source: EnergySource | None = None) -> Job:
        """Return what decisions need of this file, with the one objective that counts everywhere.

        Args:
            energy_source: What joules are on the GPUs that the job has; where they mean nothing, cost is time. None:
                as this file says.
        """
        source = energy_source or self.energy_source
        prior = self.prior
        return Job(
            name=self.name,
            batch_sizes=tuple(self.batch_sizes),
            default_batch_size=self.default_batch_size,
            max_epochs=self.max_epochs,
            eta=self.eta,
            beta=self.beta,
            window=self.window,
            window_of=self.window_of,
            policy=self.policy,
            selector=self.power_limit.choose_by,
            slowdown=self.power_limit.slowdown,
            mode=self.mode,
            max_attempts=self.max_attempts,
            seed=self.seed,
            prior=None if prior is None else (prior.mean_j, prior.standard_deviation_j**2),
            exploration_budget=self.exploration_budget,
            deadline_s=self.deadline_seconds,
            fingerprint=self.fingerprint,
            drift=self.drift,
            translate=self.translate_gpus,
            control=self.control,
            host_power_w=None if self.host_power_w == "measured" else self.host_power_w,
            in_seconds=source is EnergySource.NONE,
        )


_FILE = Kind(
    JobFile,
    name="job file",
    start="`zeus-flows init` writes one to start from",
    examples={
        "name": "my-job",
        "batch_sizes": "[32, 64, 128, 256]",
        "default_batch_size": "128",
        "max_epochs": "30",
        "target": "{metric: accuracy, value: 0.9, better: higher}",
        "target.metric": "accuracy",
        "target.value": "0.9",
        "target.better": "higher   # or lower",
        "train": "{function: my_package.my_module:train}",
        "train.function": "my_package.my_module:function",
        "gate.function": "my_package.my_module:function",
    },
)


def load_job(path: Path) -> JobFile:
    """Return the job that a file describes.

    Raises:
        ConfigError: the file cannot be read or is wrong; the text names the file, the line, what is wrong
            and what would be right.
    """
    return _FILE.load(path).model


def parse_job(text: str, *, source: str = "job file") -> JobFile:
    """Return the job that YAML text describes; `source` is what errors call it."""
    return _FILE.parse(text, source=source).model
