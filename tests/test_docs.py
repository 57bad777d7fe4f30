"""What the documentation says is so; its code blocks are in test_docs_blocks."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

from tests.docs_blocks import PAGES, ROOT
from zeus_flows.job_file import JobFile


def test_the_references_are_the_commands_own_help_and_the_template() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate_cli_reference.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.PAGE.read_text(encoding="utf-8") == generate.reference(), "run `make docs`"
    assert generate.JOB_FILE_PAGE.read_text(encoding="utf-8") == generate.job_file_reference(), "run `make docs`"


def test_every_page_is_in_the_sites_navigation_and_nothing_else_is() -> None:
    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        parts = entry.values() if isinstance(entry, dict) else entry
        assert isinstance(parts, Iterable)
        return [page for part in parts for page in pages(part)]

    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_template_explains_every_key_of_a_job_file() -> None:
    text = (ROOT / "zeus_flows/templates/job.yaml").read_text(encoding="utf-8")
    uncommented = "\n".join(re.sub(r"^# ?(?=\w+:|  \w+:)", "", line) for line in text.splitlines())
    keys = set(yaml.safe_load("\n".join(line for line in uncommented.splitlines() if not line.startswith("#"))))
    assert keys >= set(JobFile.model_fields)


def test_no_file_names_a_machine_or_a_registry() -> None:
    for page in PAGES:
        assert not re.search(r"(?<![\w.])/(?:work|root|home)/\w", page.read_text(encoding="utf-8")), page
