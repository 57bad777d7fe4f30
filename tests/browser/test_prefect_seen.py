"""The Prefect page of a flow run: the decision as a table, the profile as a figure, and links, as people see them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.browser.conftest import Shown

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]


def test_a_flow_run_shows_its_decision_and_leads_to_mlflow(page: Page, job: Shown) -> None:
    newest = job.attempts[0]
    flow_run_id = newest.data.tags["zf.prefect.flow_run_id"]
    page.goto(f"{job.prefect}/runs/flow-run/{flow_run_id}")
    page.get_by_text("Artifacts", exact=True).first.click()
    page.get_by_text("nightly-decision").first.wait_for()
    page.get_by_text("nightly-mlflow-run").first.wait_for()
    assert "nightly #12" in page.inner_text("body")
    page.get_by_text("nightly-profile").first.wait_for()
    page.get_by_text("nightly-decision").first.click()
    page.get_by_text("what is known").first.wait_for()
    text = page.inner_text("body")
    assert re.search(r"\d+ ←", text), "the chosen batch size is marked"
    assert "expected cost" in text
