from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeus_flows.core.job import Mode, WindowOf
from zeus_flows.errors import ConfigError
from zeus_flows.job_file import LearningRate, Target, load_job, parse_job

GOOD = """\
name: nightly
train:
  function: my.module:train
target:
  metric: accuracy
  value: 0.9
  better: higher
batch_sizes: [64, 32, 128]
default_batch_size: 64
max_epochs: 10
"""


def problem(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_job(text, source="job.yaml")
    return str(caught.value)


def test_a_small_file_is_enough_and_the_rest_has_defaults() -> None:
    job = parse_job(GOOD)
    assert job.batch_sizes == [32, 64, 128]
    assert (job.policy, job.mode, job.eta, job.device) == ("thompson", Mode.FULL, 0.5, "auto")
    assert job.core().default_batch_size == 64


def test_a_window_is_of_each_batch_size_unless_the_file_says_of_the_job() -> None:
    assert parse_job(GOOD + "window: 10\n").core().window_of is WindowOf.ARM
    assert parse_job(GOOD + "window: 10\nwindow_of: job\n").core().window_of is WindowOf.JOB
    assert "job.yaml:11: window_of" in problem(GOOD + "window_of: batch\n")


@pytest.mark.parametrize("path", ["zeus_flows/templates/job.yaml", "deployments/jobs/flights.yaml"])
def test_the_job_files_we_ship_are_valid(path: str) -> None:
    job = load_job(Path(__file__).parents[1] / path)
    assert job.name == "flights-late"


def test_the_template_and_the_deployed_job_are_the_same_job() -> None:
    root = Path(__file__).parents[1]
    template = load_job(root / "zeus_flows/templates/job.yaml")
    deployed = load_job(root / "deployments/jobs/flights.yaml")
    assert template.model_copy(update={"device": deployed.device}) == deployed


@pytest.mark.parametrize(
    ("change", "line", "words"),
    [
        (("better: higher", "better: up"), 7, "target.better"),
        (("  better: higher\n", ""), 4, "target.better is missing; for instance `better: higher"),
        (("batch_sizes: [64, 32, 128]", "batch_sizes: [64, -1]"), 8, "greater than 0"),
        (("default_batch_size: 64", "default_batch_size: 65"), 9, "must be one of batch_sizes"),
        (("default_batch_size", "default_batchsize"), 9, "did you mean 'default_batch_size'"),
        (("my.module:train", "my.module.train"), 3, "module:function"),
        (("max_epochs: 10", "max_epochs: ten"), 10, "max_epochs"),
        (("name: nightly", "name: ../../etc"), 1, "letters, digits"),
        (("name: nightly", "name: x' or '1'='1"), 1, "letters, digits"),
        (("max_epochs: 10", "max_epochs: 10\npolicy: tompson"), 11, "did you mean 'thompson'"),
        (("max_epochs: 10", "max_epochs: 10\ndevice: simulated-h100"), 11, "simulated-v100"),
        (("value: 0.9", "value: .nan"), 6, "finite"),
        (("name: nightly", "name: nightly\nname: again"), 2, "twice"),
        (("name: nightly", "name: [unclosed"), 2, "not valid YAML"),
    ],
)
def test_a_wrong_file_names_the_line_and_what_would_be_right(change: tuple[str, str], line: int, words: str) -> None:
    said = problem(GOOD.replace(*change))
    assert f"job.yaml:{line}: " in said
    assert words in said


def test_every_mistake_is_told_at_once() -> None:
    said = problem(GOOD.replace("max_epochs: 10", "max_epochs: -1").replace("better: higher", "better: up"))
    assert len(said.splitlines()) == 2


@given(st.text(max_size=200))
def test_no_text_makes_anything_but_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_job(text)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="zeus-flows init"):
        load_job(tmp_path / "no.yaml")


def test_a_bare_off_is_a_mode_although_yaml_reads_it_as_false() -> None:
    assert parse_job(GOOD + "mode: off\n").mode is Mode.OFF


def test_a_version_may_be_written_as_a_number() -> None:
    assert parse_job(GOOD + "version: 2\n").version == "2"


def test_target_version_optimizer_and_learning_rate_make_the_fingerprint_and_eta_does_not() -> None:
    job = parse_job(GOOD)
    assert parse_job(GOOD + "eta: 1.0\n").fingerprint == job.fingerprint
    for change in ("version: '2'\n", "optimizer: sgd\n", "learning_rate: {scaling: linear}\n"):
        assert parse_job(GOOD + change).fingerprint != job.fingerprint
    assert parse_job(GOOD.replace("0.9", "0.8")).fingerprint != job.fingerprint


def test_nan_never_reaches_a_target() -> None:
    for better in ("higher", "lower"):
        assert not Target.model_validate({"metric": "m", "value": 0.5, "better": better}).reached(float("nan"))


@pytest.mark.parametrize(("scaling", "expected"), [("sqrt", 0.02), ("linear", 0.04), ("none", 0.01)])
def test_the_learning_rate_follows_the_batch_size(scaling: str, expected: float) -> None:
    rate = LearningRate.model_validate({"base": 0.01, "scaling": scaling})
    assert rate.at(256, 64) == pytest.approx(expected)
