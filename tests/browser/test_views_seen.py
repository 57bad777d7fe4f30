"""Every saved view, opened as people open it: what they must see is there, and no chart is empty."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.browser.conftest import RECURRENCES, Shown
from zeus_flows.ledger.mlflow.views import SavedView, ViewId, all_views

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

AGAINST = (("time_to_accuracy_s", "energy_to_accuracy_j"), ("batch_size", "cost_j"), ("power_limit_w", "cost_j"))
VIEWS = {view.id: view for view in all_views(joules=True)}


def opened(page: Page, job: Shown, view: SavedView) -> None:
    """Open a view, and wait until MLflow shows it under its name; close what MLflow lays over it."""
    page.goto(f"{job.mlflow}/{view.address('1')}")
    page.get_by_test_id("saved-views-trigger").get_by_text(view.name, exact=True).wait_for()
    for closing in ("Hide banner", "Close"):
        if (button := page.get_by_role("button", name=closing, exact=True)).count():
            button.first.click()


def charts_of(page: Page, count: int) -> dict[str, int]:
    """Return how many points each chart draws, by its title; there must be so many charts, none of them empty."""
    cards, found = page.get_by_test_id("experiment-view-compare-runs-card"), dict[str, int]()
    cards.nth(count - 1).wait_for()
    for card in cards.all():
        card.scroll_into_view_if_needed()
        card.locator(".scatterlayer .point, canvas").first.wait_for(state="attached")
        found[card.locator("h4").first.inner_text()] = card.locator(".scatterlayer .point").count()
    page.mouse.wheel(0, -5000)
    assert len(found) == count
    return found


def test_the_link_that_the_command_prints_opens_the_first_view(page: Page, job: Shown) -> None:
    printed = re.findall(r"http://127\.0\.0\.1:5000/(#\S+)", job.printed)
    assert printed == [VIEWS[ViewId.RECURRENCES].address("1")]
    page.goto(f"{job.mlflow}/{printed[0]}")
    page.get_by_test_id("saved-views-trigger").get_by_text("Recurrences", exact=True).wait_for()


def test_recurrences_are_a_table_of_choices_costs_and_reasons(page: Page, job: Shown) -> None:
    page.set_viewport_size({"width": 2400, "height": 1000})
    opened(page, job, VIEWS[ViewId.RECURRENCES])
    page.get_by_text(f"{len(job.attempts)} matching runs").wait_for()
    headers = [cell.inner_text() for cell in page.locator(".ag-header-cell").all()]
    wanted = [f"zf.{n}" for n in ("batch_size", "power_limit_w", "energy_to_accuracy_j", "time_to_accuracy_s")]
    wanted += [f"zf.{n}" for n in ("cost_j", "epochs", "saved_j", "outcome", "reason")]
    assert [header for header in headers if header.startswith("zf.")] == wanted
    text = page.inner_text("body")
    assert "#1 · 128" in text
    assert "converged" in text
    assert "batch size" in text  # a reason
    cells = [cell.inner_text() for cell in page.locator(".ag-cell").all()]
    numbers = [cell for cell in cells if re.fullmatch(r"-?[\d.]+", cell)]
    assert numbers
    assert max(map(len, numbers)) <= 8, "a number that nobody can read"


def test_the_description_is_above_the_runs_with_links_that_lead_to_the_views(page: Page, job: Shown) -> None:
    opened(page, job, VIEWS[ViewId.RECURRENCES])
    link = page.get_by_role("link", name="Drift windows").first
    link.wait_for()
    text = page.inner_text("body")
    assert re.search(r"(Saved|Took) -?\d+ %.* of the|runs now", text)
    assert "[//]" not in text, "the line with the digest is not for people"
    with page.context.expect_page() as followed:
        link.click()
    followed.value.get_by_test_id("saved-views-trigger").get_by_text("Drift windows", exact=True).wait_for()
    followed.value.close()


def test_over_recurrences_are_lines_with_a_point_for_each(page: Page, job: Shown) -> None:
    page.set_viewport_size({"width": 1600, "height": 1900})
    opened(page, job, VIEWS[ViewId.OVER_RECURRENCES])
    page.get_by_text("Saved so far, against the default").wait_for()
    found = charts_of(page, 9)
    once = ["zf.cost_j", "zf.energy_to_accuracy_j", "zf.time_to_accuracy_s", "zf.batch_size", "zf.power_limit_w"]
    assert {title: found[title] for title in once} == dict.fromkeys(once, RECURRENCES)
    assert found["zf.saved/energy_j"] >= RECURRENCES - 1


def test_energy_against_time_has_a_point_for_each_run_that_reached_the_target(page: Page, job: Shown) -> None:
    page.set_viewport_size({"width": 1600, "height": 1500})
    opened(page, job, VIEWS[ViewId.ENERGY_TIME])
    page.get_by_text("Every choice and what it led to").wait_for()
    found = charts_of(page, 4)
    assert found.pop("Parallel Coordinates") == 0  # lines on a canvas
    assert list(found) == [f"zf.{x} vs. zf.{y}" for x, y in AGAINST]
    reached = sum(run.data.tags["zf.outcome"] == "converged" for run in job.attempts)
    assert set(found.values()) == {reached}, "not only the newest ten"
    assert reached > 10


def test_drift_windows_are_a_table(page: Page, job: Shown) -> None:
    page.set_viewport_size({"width": 2400, "height": 1000})
    opened(page, job, VIEWS[ViewId.WINDOWS])
    page.get_by_text("1 matching run").wait_for()
    headers = [cell.inner_text() for cell in page.locator(".ag-header-cell").all()]
    assert {"zf.window", "zf.first_recurrence", "zf.opened_by", "zf.best_batch_size"} <= set(headers)


def test_epochs_are_lines_of_the_newest_runs(page: Page, job: Shown) -> None:
    page.set_viewport_size({"width": 1600, "height": 1300})
    opened(page, job, VIEWS[ViewId.EPOCHS])
    found = charts_of(page, 4)
    assert list(found) == ["zf.epoch/metric", "zf.epoch/energy_j", "zf.epoch/time_s", "zf.epoch/power_limit_w"]
    assert min(found.values()) >= 10


def test_the_menu_lists_all_five(page: Page, job: Shown) -> None:
    opened(page, job, VIEWS[ViewId.RECURRENCES])
    page.get_by_test_id("saved-views-trigger").click()
    for view in VIEWS.values():
        page.get_by_role("menuitem").get_by_text(view.name, exact=True).first.wait_for()
