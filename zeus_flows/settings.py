"""The only reader of environment variables.

| variable | meaning | default |
| --- | --- | --- |
| ZEUS_FLOWS_STATE_DIR | what must outlive a process: power journal, locks, outbox | XDG state home; /var/lib as root |
| ZEUS_FLOWS_CACHE_DIR | what can be made again | XDG cache home |
| MLFLOW_TRACKING_URI | where runs go, unless a flag or the job file says | sqlite:///mlflow.db |
| MLFLOW_WORKSPACE | the team's part of an MLflow server that has workspaces | the server's default |
| PREFECT_API_URL | where flow runs report to | an ephemeral server |
| CUDA_VISIBLE_DEVICES | which GPUs the job has | all |
| SUDO_UID | whose state directory root may use | |
| ZEUSD_SOCK_PATH, ZEUSD_HOST_PORT, ZEUSD_TOKEN | where the Zeus daemon listens | /run/zeusd/zeusd.sock |
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from zeus_flows.errors import ConfigError
from zeus_flows.masking import remember, secrets_of, secrets_of_uri, without_secrets

DEFAULT_TRACKING_URI = "sqlite:///mlflow.db"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment says, read once."""

    state_dir: Path
    cache_dir: Path
    tracking_uri: str | None = field(default=None, repr=False)
    prefect_api_url: str | None = None
    cuda_visible_devices: str | None = None
    zeusd_socket: Path = Path("/run/zeusd/zeusd.sock")
    zeusd_host_port: str | None = None
    zeusd_token: str | None = field(default=None, repr=False)

    def tracking(self, *stated: str | None) -> str:
        """Return the tracking URI: the first stated one (flag, then job file), the environment's, the default.

        One without credentials takes those of another that is the same but for them: what a deployment pins is public.
        What is secret in it is masked from then on.

        >>> read_settings({}).tracking(None, "sqlite:///mine.db")
        'sqlite:///mine.db'
        >>> here = read_settings({"MLFLOW_TRACKING_URI": "postgresql://me:secret@db/mlflow"})
        >>> here.tracking("postgresql://db/mlflow"), here.tracking("postgresql://elsewhere/mlflow")
        ('postgresql://me:secret@db/mlflow', 'postgresql://elsewhere/mlflow')
        """
        known = [uri for uri in (*stated, self.tracking_uri) if uri] or [DEFAULT_TRACKING_URI]
        uri = next((uri for uri in known if uri != known[0] == without_secrets(uri)), known[0])
        remember(*secrets_of_uri(uri))
        return uri


def read_settings(environ: Mapping[str, str] | None = None, *, shared: Mapping[str, str] | None = None) -> Settings:
    """Return the settings that `environ` (the process's by default) states. Its secrets are masked from then on.

    `shared` is what counts where that says nothing.

    >>> read_settings({"ZEUSD_TOKEN": "mine"}, shared={"ZEUSD_TOKEN": "theirs"}).zeusd_token
    'mine'
    """
    env: Mapping[str, str] = os.environ if environ is None else environ
    env = {**(shared or {}), **{name: value for name, value in env.items() if value or name not in (shared or {})}}
    remember(*(secret for secret in secrets_of(env.items()) if not os.path.exists(secret)))  # noqa: PTH110
    home = Path(env.get("HOME") or "~").expanduser()
    state_home = Path("/var/lib") if os.geteuid() == 0 else home / ".local" / "state"
    if env.get("XDG_STATE_HOME"):
        state_home = Path(env["XDG_STATE_HOME"])
    cache_home = Path(env["XDG_CACHE_HOME"]) if env.get("XDG_CACHE_HOME") else home / ".cache"
    return Settings(
        state_dir=Path(env.get("ZEUS_FLOWS_STATE_DIR") or state_home / "zeus_flows"),
        cache_dir=Path(env.get("ZEUS_FLOWS_CACHE_DIR") or cache_home / "zeus_flows"),
        tracking_uri=env.get("MLFLOW_TRACKING_URI") or None,
        prefect_api_url=env.get("PREFECT_API_URL") or None,
        cuda_visible_devices=env.get("CUDA_VISIBLE_DEVICES"),
        zeusd_socket=Path(env.get("ZEUSD_SOCK_PATH") or "/run/zeusd/zeusd.sock"),
        zeusd_host_port=env.get("ZEUSD_HOST_PORT") or None,
        zeusd_token=env.get("ZEUSD_TOKEN") or None,
    )


def workspace(tracking_uri: str) -> str:
    """Return the workspace of an MLflow server that its client goes to; empty where nothing says one."""
    return os.environ.get("MLFLOW_WORKSPACE", "") if tracking_uri.startswith(("http://", "https://")) else ""


def trusted_users() -> frozenset[int]:
    """Return whose files this process may use: its own user's, root's, and those of whoever typed `sudo`."""
    behind_sudo = os.environ.get("SUDO_UID", "")
    return frozenset({0, os.geteuid(), *([int(behind_sudo)] if os.geteuid() == 0 and behind_sudo.isdecimal() else [])})


def public_uri(uri: str | None, what: str) -> str | None:
    """Return a URI that may be a flow's parameter, which everyone can read; `what` is what the user calls it.

    Raises:
        ConfigError: it holds a secret.
    """
    if uri and without_secrets(uri) != uri:
        raise ConfigError(f"{what} holds a secret; put it into MLFLOW_TRACKING_URI or the job file instead")
    return uri


def quiet_libraries() -> None:
    """Set defaults for Prefect and MLflow in this process, before they are imported; what the user set stays.

    Their start-up chatter would drown the rows people came for, neither calls home from an embedded run, and a
    loaded machine starts Prefect's ephemeral server in more than its default 20 s.
    """
    for name, value in (
        ("PREFECT_LOGGING_LEVEL", "WARNING"),
        ("PREFECT_SERVER_LOGGING_LEVEL", "WARNING"),
        ("PREFECT_SERVER_ANALYTICS_ENABLED", "false"),
        ("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120"),
        ("MLFLOW_LOGGING_LEVEL", "WARNING"),
        ("MLFLOW_DISABLE_TELEMETRY", "true"),
    ):
        os.environ.setdefault(name, value)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.ERROR)  # it tells each try to reach a database


_BOUNDS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
}


def bound_mlflow(tracking_uri: str = "") -> None:
    """Bound each HTTP call to an MLflow server, unless the user did: by default one may block for minutes.

    Where a tracking URI holds a secret, MLflow does not print it: it would with each run that training ends.
    """
    for name, value in _BOUNDS.items():
        os.environ.setdefault(name, value)
    if without_secrets(tracking_uri) != tracking_uri:
        os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"


def environment_of_child(changes: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment for a training command, with changes.

    Python writes its output at once, so that it can be read while it trains. The bounds that we set on our own calls to
    MLflow are not the command's.
    """
    ours = {name for name, value in _BOUNDS.items() if os.environ.get(name) == value}
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    return inherited | {"PYTHONUNBUFFERED": "1", "ZEUS_FLOWS_PARENT": str(os.getpid())} | dict(changes)
