"""What a deployment pins, and what a caller of one of its runs may state.

A run's parameters are whatever its caller sent: Prefect's server checks them only where the caller does not say
otherwise, and anyone who may start a run may change those of one that waits. So a run takes what is pinned from its
deployment. Whoever may edit deployments is trusted: they may name another entry point as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import get_client

from zeus_flows.errors import ConfigError


def digest_of(content: bytes) -> str:
    """Return the digest that a deployment pins a file by."""
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """A file as it was when it was deployed."""

    path: Path
    digest: str | None
    command: str

    def read(self) -> str:
        """Return what the file says.

        Raises:
            ConfigError: it is not there, or it is another one than was deployed.
        """
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{Path.cwd() / self.path}: cannot be read: {error.strerror}\n"
                "  a deployment names a file on its workers' machines: put it there, or say where with `--folder`"
            ) from None
        found = digest_of(content)
        if self.digest is not None and found != self.digest:
            raise ConfigError(
                f"{Path.cwd() / self.path} has changed since it was deployed ({self.digest[:12]} then, {found[:12]} "
                f"now); nothing has run\n  look at it, then type `{self.command}` in {Path.cwd()}"
            )
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.path}: cannot be read: {error}") from None


def pinned_parameters(stated: dict[str, Any], *, free: Collection[str]) -> dict[str, Any]:
    """Return the parameters that count for this flow run: those of its deployment, and the free ones as stated.

    Outside of a deployment all count as stated: whoever calls the flow there runs code of their own already.

    Raises:
        ConfigError: the caller states something that is pinned. A run that Prefect scheduled before the deployment
            was changed is no caller's, and gets what is pinned now.
    """
    if runtime.deployment.id is None:
        return stated
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment(UUID(str(runtime.deployment.id)))
        run = client.read_flow_run(UUID(str(runtime.flow_run.id)))
    pinned = {name: value for name, value in deployment.parameters.items() if name not in free}
    others = sorted(name for name, value in run.parameters.items() if name not in free and value != pinned.get(name))
    if others and not run.auto_scheduled:
        raise ConfigError(
            f"{', '.join(others)}: pinned by the deployment {deployment.name}, and the caller of this run stated "
            f"otherwise; nothing has run\n  a caller may state {' and '.join(sorted(free)) or 'nothing'}"
        )
    return dict.fromkeys(stated) | pinned | {name: stated[name] for name in free if name in stated}
