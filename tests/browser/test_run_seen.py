"""An attempt's page in MLflow: the description as people read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.browser.conftest import Shown

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]


def test_a_run_s_page_says_why_and_how_it_ended_with_what_was_believed_as_a_table(page: Page, job: Shown) -> None:
    page.set_viewport_size({"width": 1600, "height": 1500})
    newest = job.attempts[0]
    page.goto(f"{job.mlflow}/#/experiments/1/runs/{newest.info.run_id}")
    page.get_by_text("What was believed of each batch size").wait_for()
    page.get_by_role("columnheader", name="expected cost").wait_for()
    text = page.inner_text("body")
    assert newest.info.run_name in text
    assert newest.data.tags["zf.reason"] in text
    assert "Power limit" in text
    assert "Converged after" in text
    assert page.get_by_role("link", name="drift window").get_attribute("href") == (
        f"#/experiments/1/runs/{newest.data.tags['zf.drift_window']}"
    )
    page.get_by_role("link", name="Prefect: nightly #12").wait_for()
    with page.context.expect_page() as opened:
        page.get_by_role("link", name="drift window").click()
    opened.value.get_by_text("drift window 1").first.wait_for()
    opened.value.close()


def test_a_run_s_figures_are_pictures(page: Page, job: Shown) -> None:
    newest = job.attempts[0]
    for name in ("power-profile", "batch-sizes", "saved-so-far"):
        page.goto(f"{job.mlflow}/#/experiments/1/runs/{newest.info.run_id}/artifacts/figures/{name}.svg")
        picture = page.locator(f"img[alt*='{name}'], img[src*='blob:'], img[src*='{name}']").first
        picture.wait_for()
        assert picture.evaluate("image => image.naturalWidth") > 0, name
