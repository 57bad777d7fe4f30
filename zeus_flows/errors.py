"""Every error zeus_flows raises on purpose.

* ZeusFlowsError
  x ConfigError             a job file or a flag is wrong; nothing has run (exit 2)
  x WrongPlatform           this operating system cannot run zeus_flows
  x MeasurementError        a reading cannot be believed
  x DeviceError             a GPU, or its absence (exit 4)
    + NoDevice              the job wants a GPU and none is here
    + NotSupported          this GPU cannot do that
    + PowerPermissionError  may not set power limits
    + LimitOutOfRange       the limit is outside what the GPU accepts
    + DeviceLost            left the bus; never retried
  x TrainingError           the train function broke the session's contract
    + TrainFunctionFailed   it raised an exception of its own
    + CommandFailed         a training command ended with an error, or without a metric
      . CommandOutOfMemory  it ran out of GPU memory
    + TargetNeverReached    no attempt of this recurrence converged (exit 3)
  x StoreError              MLflow (exit 5)
    + StoreUnavailable      did not answer; safe to retry
    + AlreadyObserved       this attempt has its observation
    + DeclaredDead          the recurrence was closed while its process was thought dead
    + UnknownAttempt        no decision was written for this attempt
    + AlreadyDecided        this attempt has another decision
    + StoreDenied           wants other credentials; safe to retry with them
    + UnreadableRecord      a stored decision or observation is broken
    + LedgerDamaged         a run or experiment of the ledger was deleted; `zeus-flows ledger repair` mends it

  x PrefectUnavailable      did not answer (exit 5)

`exit_code` is what the command line exits with.
"""

from __future__ import annotations

from zeus_flows.masking import masked


class ZeusFlowsError(Exception):
    """Base of everything raised on purpose; its text is meant for a person, and holds no secret."""

    exit_code = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*(masked(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(ZeusFlowsError):
    """A job file, a flag or an environment variable is wrong. Nothing has run."""

    exit_code = 2


class WrongPlatform(ZeusFlowsError):
    """The operating system lacks what zeus_flows is built on, such as locks that the kernel lets go of."""

    def __init__(self) -> None:
        super().__init__("zeus_flows does not run on Windows; use Linux, or macOS with simulated GPUs")


class MeasurementError(ZeusFlowsError):
    """A reading is NaN, infinite, negative or went backwards."""


class DeviceError(ZeusFlowsError):
    """Something about a GPU."""

    exit_code = 4


class NoDevice(DeviceError):
    """The job wants a GPU and this machine has none that can be used."""


class NotSupported(DeviceError):
    """This GPU, or its driver, cannot do what was asked."""


class PowerPermissionError(DeviceError):
    """This process may not set power limits or clocks."""


class LimitOutOfRange(DeviceError):
    """The power limit is outside the range the GPU accepts."""


class DeviceLost(DeviceError):
    """The GPU left the bus. Never retried; the arm is not blamed."""


class TrainingError(ZeusFlowsError):
    """The train function did not keep the session's contract."""


class TrainFunctionFailed(TrainingError):
    """The train function raised; the text has its traceback."""


class CommandFailed(TrainingError):
    """The training command ended with an error, or its metric never came; the text has its last lines."""


class CommandOutOfMemory(CommandFailed):
    """The training command's output says that the GPU's memory did not suffice."""


class TargetNeverReached(TrainingError):
    """No attempt of this recurrence reached the target."""

    exit_code = 3


class StoreError(ZeusFlowsError):
    """Something about the MLflow store."""

    exit_code = 5


class StoreUnavailable(StoreError):
    """MLflow did not answer in time. Safe to retry."""


class AlreadyObserved(StoreError):
    """The attempt already has its single observation; nothing was changed."""


class UnknownAttempt(StoreError):
    """No decision was written for this attempt, so nothing can be observed about it."""


class DeclaredDead(StoreError):
    """The recurrence was closed because its process was thought dead; nothing can be added to it."""


class AlreadyDecided(StoreError):
    """The attempt already has its decision, and it is another one; nothing was changed."""


class StoreDenied(StoreError):
    """MLflow does not accept these credentials. Nothing is lost: what waits is kept until they are right."""


class UnreadableRecord(StoreError):
    """A stored decision or observation is broken, as if somebody changed it by hand."""


class LedgerDamaged(StoreError):
    """A run or experiment that holds the ledger together was deleted. Nothing else is lost: it can be mended."""


class PrefectUnavailable(ZeusFlowsError):
    """Prefect's API did not answer, so that no flow can run."""

    exit_code = 5
