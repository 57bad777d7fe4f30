"""Reads params straight from the tables of MLflow's database, where a history is read whole.

MLflow's own search makes objects of every tag, metric and param of a run, which is most of the work where only one
param of each is wanted. Where the store is no database of ours to look into (a server), or its tables are others than
these, there is no answer and whoever asks reads the runs one way or the other as usual.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final

from mlflow import MlflowClient
from sqlalchemy import column, select, table
from sqlalchemy.engine import Engine
from sqlalchemy.exc import SQLAlchemyError

log = logging.getLogger(__name__)

_RUNS: Final = table("runs", column("run_uuid"), column("lifecycle_stage"))
_PARAMS: Final = table("params", column("run_uuid"), column("key"), column("value"))


def read_params(client: MlflowClient, run_ids: Sequence[str], keys: Iterable[str] = ()) -> dict[str, dict[str, str]]:
    """Return params of those runs that are there and were not deleted; nothing where tables cannot be read.

    Args:
        client: Whose database.
        run_ids: Which runs; a few hundred at a time.
        keys: Which params; all of them where none are named. A run that has none of them is left out.
    """
    engine = getattr(getattr(getattr(client, "_tracking_client", None), "store", None), "engine", None)
    if not isinstance(engine, Engine):
        return {}
    run, param = _RUNS.c, _PARAMS.c
    query = select(param.run_uuid, param.key, param.value).join(_RUNS, run.run_uuid == param.run_uuid)
    query = query.where(run.run_uuid.in_(run_ids), run.lifecycle_stage == "active")
    if wanted := tuple(keys):
        query = query.where(param.key.in_(wanted))
    found: dict[str, dict[str, str]] = {}
    try:
        with engine.connect() as connection:
            for run_id, key, value in connection.execute(query):
                found.setdefault(run_id, {})[key] = value
    except SQLAlchemyError as error:
        log.debug("MLflow's tables cannot be read directly: %s", type(error).__name__)
        return {}
    return found
