"""One process of a machine at a time works on an experiment.

The kernel lets go of the lock when its holder dies, so that a killed experiment can be taken up at once, and nothing
needs to be asked of MLflow. Processes on other machines do not see it: for them there is a lease (`experiment_lease`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zeus_flows.errors import ConfigError
from zeus_flows.ledger.mlflow.address import location
from zeus_flows.process_lock import ProcessLock


@contextmanager
def alone(name: str, *, tracking_uri: str, state_dir: Path) -> Iterator[None]:
    """Hold the lock of an experiment for the block.

    Args:
        name: The experiment.
        tracking_uri: Where its runs go: one of that name elsewhere is another one.
        state_dir: Where locks are.

    Raises:
        ConfigError: another process holds it, or locks cannot be kept there.
    """
    store = location(tracking_uri)
    folder = state_dir / "experiments"
    lock = ProcessLock(folder / f"{name}-{hashlib.sha256(store.encode()).hexdigest()[:16]}.lock")
    try:
        held = lock.acquire()
    except OSError as error:
        raise ConfigError(
            f"the lock of an experiment cannot be kept in {folder} ({error.strerror}); "
            "set ZEUS_FLOWS_STATE_DIR to a folder that can be written to"
        ) from None
    if not held:
        raise ConfigError(
            f"the experiment {name} in {store} is being run by process {lock.holder()}; "
            "wait for it, or give this one another name"
        )
    try:
        yield
    finally:
        lock.release()
