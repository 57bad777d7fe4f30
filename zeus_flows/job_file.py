"""The job file: what a user writes, validated, with file and line in every error."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from zeus_flows.core.job import Drift, Job, Mode, Rollout, WindowOf
from zeus_flows.core.policy import POLICIES
from zeus_flows.core.power_profile import Knob
from zeus_flows.core.ready_by import read_ready_by
from zeus_flows.core.records import EnergySource
from zeus_flows.job_sections.gpu_section import DEVICES, PowerLimitSection, SimulatedGpu, Simulation
from zeus_flows.job_sections.model_section import GateSection, RegisteredSection
from zeus_flows.job_sections.price_section import PricesSection
from zeus_flows.job_sections.train_section import TrainSection
from zeus_flows.job_sections.wording import plain_name
from zeus_flows.yaml_file import Kind, Section, one_of


class Target(Section):
    """When a model is good enough. Which way is better has no default: a guess would train the wrong model."""

    metric: str = Field(min_length=1, max_length=64)
    value: float
    better: Literal["higher", "lower"]

    def reached(self, value: float) -> bool:
        """Whether a metric value meets the target; NaN never does.

        >>> Target(metric="accuracy", value=0.9, better="higher").reached(0.91)
        True
        """
        return value >= self.value if self.better == "higher" else value <= self.value


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


class RolloutSection(Section):
    """How the mode grows with a job's recurrences: so many only look, then so many keep the batch size."""

    observe: int = Field(default=0, ge=0)
    power: int = Field(default=0, ge=0)


class Prior(Section):
    """What is believed of every batch size's cost before the first run (Algorithm 2)."""

    mean_j: float = Field(gt=0)
    standard_deviation_j: float = Field(gt=0)


class JobFile(Section):
    """A job as its user writes it. `zeus-flows init` writes a commented one."""

    name: str
    version: str = "1"
    mode: Mode = Mode.FULL
    rollout: RolloutSection | None = None
    device: str = "auto"
    shared_gpu: bool = False
    knob: Knob = Knob.POWER_LIMIT
    locked_clocks_mhz: int | None = Field(default=None, gt=0, le=100_000)
    gpus: int | None = Field(default=None, ge=1, le=99)
    accumulate: bool = False
    batch_sizes: list[Annotated[int, Field(gt=0, le=10**9)]] = Field(min_length=1, max_length=200)
    default_batch_size: int = Field(gt=0)
    target: Target
    max_epochs: int = Field(gt=0, le=10**9)
    stop_at_target: bool = True
    eta: float = Field(default=0.5, ge=0, le=1)
    beta: float = Field(default=2.0, gt=1)
    window: int | None = Field(default=None, ge=2, le=10**9)
    window_of: WindowOf = WindowOf.ARM
    drift: Drift = Drift.RESET
    policy: str = "thompson"
    translate_gpus: bool = True
    figures: bool = True
    max_attempts: int = Field(default=4, ge=1, le=1_000)
    exploration_budget: float | None = Field(default=None, ge=0)
    deadline_seconds: float | None = Field(default=None, gt=0)
    ready_by: str | None = None
    control: int | None = Field(default=None, ge=2, le=10**9)
    host_power_w: Annotated[float, Field(ge=0)] | Literal["measured"] = 0.0
    prior: Prior | None = None
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    power_limit: PowerLimitSection = PowerLimitSection()
    optimizer: str = "adam"
    learning_rate: LearningRate = LearningRate()
    train: TrainSection
    gate: GateSection | None = None
    model: RegisteredSection | None = None
    prices: PricesSection = PricesSection()
    tracking_uri: str | None = Field(default=None, repr=False)
    simulation: Simulation = Simulation()

    @field_validator("name")
    @classmethod
    def _name_is_plain(cls, value: str) -> str:
        value = plain_name(value)
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

    @field_validator("ready_by", mode="before")
    @classmethod
    def _time_is_in_a_zone(cls, value: Any) -> Any:
        if isinstance(value, int):  # YAML 1.1 reads a bare 06:00 as a number of base 60
            raise ValueError("must be quoted, with its time zone, such as '06:00 Europe/Berlin'")
        return str(read_ready_by(value)) if isinstance(value, str) else value

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

    @model_validator(mode="after")
    def _batch_sizes_are_shared_out(self) -> JobFile:
        odd = [b for b in self.batch_sizes if b % (self.gpus or 1)]
        if odd:
            raise ValueError(f"batch_sizes are over all {self.gpus} gpus, and {odd[0]} cannot be shared out evenly")
        return self

    @model_validator(mode="after")
    def _batch_sizes_reach_the_training(self) -> JobFile:
        if self.mode is Mode.FULL and len(self.batch_sizes) > 1 and not self.train.uses_batch_size:
            raise ValueError(
                "train.command has no {batch_size}, so that every batch size would train alike; "
                "put it where the script takes its batch size, or set mode: power"
            )
        return self

    @model_validator(mode="after")
    def _the_model_can_be_had(self) -> JobFile:
        if self.model is None:
            return self
        if self.model.path is None and self.train.command is not None:
            raise ValueError("model: a command needs a path, such as {name: ranker, path: out/model}")
        if self.model.path is not None and self.train.command is None:
            raise ValueError("model: path is for a command; a function calls session.keep(model)")
        promote = self.model.promote
        if (promote.guards or promote.margin) and self.gate is None and promote.function is None:
            raise ValueError(
                "model: promote needs a function that evaluates models, such as "
                "{function: my_package.my_module:evaluate}, or a gate"
            )
        if self.target.metric in promote.guards:
            raise ValueError(f"model: promote.margin is for {self.target.metric}; guards are for other metrics")
        return self

    @model_validator(mode="after")
    def _parts_reach_the_training(self) -> JobFile:
        if self.accumulate and not self.train.accumulates:
            raise ValueError(
                "accumulate needs a command that takes micro-batches: put {micro_batch_size} where the script takes "
                "what it loads at once, and {accumulation_steps} where it takes after how many of them it steps"
            )
        return self

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
        prior, rollout = self.prior, self.rollout
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
            rollout=None if rollout is None else Rollout(rollout.observe, rollout.power),
            max_attempts=self.max_attempts,
            seed=self.seed,
            prior=None if prior is None else (prior.mean_j, prior.standard_deviation_j**2),
            exploration_budget=self.exploration_budget,
            deadline_s=self.deadline_seconds,
            ready_by=None if self.ready_by is None else read_ready_by(self.ready_by),
            fingerprint=self.fingerprint,
            drift=self.drift,
            translate=self.translate_gpus,
            control=self.control,
            host_power_w=None if self.host_power_w == "measured" else self.host_power_w,
            in_seconds=source is EnergySource.NONE,
            accumulate=self.accumulate,
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
        "model": "{name: my-model}",
        "model.name": "my-model",
        "prices": "{per_kwh: 0.28, currency: EUR, carbon_g_per_kwh: 380}",
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
