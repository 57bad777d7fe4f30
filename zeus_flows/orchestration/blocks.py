"""A Prefect block for what the workers of a fleet share. Prefect finds it by the package's entry point.

    prefect block register --module zeus_flows.orchestration.blocks

What a worker's own environment says comes first. Nothing heavy is imported here: Prefect imports this on its own.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar, Final

import httpx
from prefect.blocks.core import Block
from prefect.exceptions import PrefectException
from prefect.settings import get_current_settings
from pydantic import Field, SecretStr

from zeus_flows.settings import Settings, read_settings

log = logging.getLogger(__name__)

#: The block that flows look for.
SHARED: Final = "shared"
_PRICES: Final = ("per_kwh", "currency", "carbon_g_per_kwh")


class ZeusFlowsSettings(Block):
    """What the workers of a fleet share, unless their own environment says otherwise.

    Example:
        `ZeusFlowsSettings(tracking_uri="https://mlflow.example.org").save("shared")`
    """

    _block_type_name: ClassVar[str] = "Zeus Flows settings"
    _block_type_slug: ClassVar[str] = "zeus-flows-settings"
    _description: ClassVar[str] = (
        "Where MLflow, the state directory and the Zeus daemon are, and what energy costs, for every job of a fleet."
    )

    tracking_uri: SecretStr | None = Field(default=None, description="MLFLOW_TRACKING_URI; it may hold a password.")
    state_dir: str | None = Field(default=None, description="ZEUS_FLOWS_STATE_DIR, on the workers' machines.")
    zeusd_socket: str | None = Field(default=None, description="ZEUSD_SOCK_PATH: the Zeus daemon's socket.")
    zeusd_host_port: str | None = Field(default=None, description="ZEUSD_HOST_PORT, where it listens on TCP.")
    zeusd_token: SecretStr | None = Field(default=None, description="ZEUSD_TOKEN, where it wants one.")
    per_kwh: float | None = Field(default=None, description="What a kilowatt hour costs, where a job file says none.")
    currency: str | None = Field(default=None, description="Of that price, such as EUR.")
    carbon_g_per_kwh: float | None = Field(default=None, description="Grams of CO2 that a kilowatt hour emits.")

    def environment(self) -> dict[str, str]:
        """Return the environment variables that this stands for."""
        stated = {
            "MLFLOW_TRACKING_URI": self.tracking_uri,
            "ZEUS_FLOWS_STATE_DIR": self.state_dir,
            "ZEUSD_SOCK_PATH": self.zeusd_socket,
            "ZEUSD_HOST_PORT": self.zeusd_host_port,
            "ZEUSD_TOKEN": self.zeusd_token,
        }
        return {k: v.get_secret_value() if isinstance(v, SecretStr) else v for k, v in stated.items() if v is not None}


def shared_settings() -> Settings:
    """Return this process's settings; what its environment leaves open is as the block `shared` says.

    A server that does not answer is no reason not to train.
    """
    shared = _shared()
    return read_settings() if shared is None else read_settings(shared=shared.environment())


def shared_prices() -> dict[str, Any]:
    """Return what the block `shared` says of prices, in the words of a job file. No server is started to ask it."""
    shared = None if get_current_settings().api.url is None else _shared()
    named = {} if shared is None else {name: getattr(shared, name) for name in _PRICES}
    return {name: value for name, value in named.items() if value is not None}


def _shared() -> ZeusFlowsSettings | None:
    try:
        shared = ZeusFlowsSettings.load(SHARED, validate=False)
    except ValueError:
        return None  # there is none
    except (httpx.HTTPError, PrefectException, RuntimeError) as error:
        log.warning("the block %s could not be read: %s", SHARED, type(error).__name__)
        return None
    assert isinstance(shared, ZeusFlowsSettings)
    return shared
