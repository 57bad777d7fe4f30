"""What MLflow's errors mean: whether to try again, and what to do. `MlflowClient` raises one kind for everything."""

from __future__ import annotations

import re
from typing import Final

from mlflow.exceptions import MlflowException

from zeus_flows.errors import StoreDenied, StoreError, StoreUnavailable, UnknownAttempt
from zeus_flows.masking import masked

#: Error codes that are an answer: trying again would bring the same.
_ANSWERS: Final = frozenset(
    {
        "INVALID_PARAMETER_VALUE",
        "RESOURCE_DOES_NOT_EXIST",
        "RESOURCE_ALREADY_EXISTS",
        "BAD_REQUEST",
        "INVALID_STATE",
        "ENDPOINT_NOT_FOUND",
    }
)
_DENIALS: Final = frozenset({"PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED"})
_DENIED: Final = re.compile(r"error code 40[13]\b")
_INACTIVE: Final = re.compile(r"must be in the 'active' state")


def named_error(error: MlflowException) -> StoreError:
    """Return MLflow's error as one that says whether to try again."""
    text = f"MLflow: {_first_line(error)}"
    if error.error_code in _DENIALS or _DENIED.search(str(error)[:300]):
        return StoreDenied(
            f"{text}\n  set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        )
    if error.error_code == "RESOURCE_DOES_NOT_EXIST":
        return UnknownAttempt(text)
    return StoreError(text) if error.error_code in _ANSWERS else StoreUnavailable(text)


def _first_line(error: MlflowException) -> str:
    r"""Return the start of MLflow's message without secrets: it quotes URIs, and the rest may be SQL with its values.

    >>> _first_line(MlflowException("API request to http://me:secret@host/api?token=secret failed\nmore"))
    'API request to http://***@host/api?token=*** failed'
    """
    return masked((str(error).splitlines() or [error.error_code])[0])[:300].strip()


def is_about_a_deleted_run(error: StoreError) -> bool:
    """Return whether MLflow refused a write because its run was deleted."""
    return _INACTIVE.search(str(error)) is not None
