"""What energy costs and emits: charged by the hour, and read from a job file or a CSV file."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeus_flows.core.prices import KWH_J, EnergyRate, Tariff, Used, charge, charge_all
from zeus_flows.errors import ConfigError
from zeus_flows.job_file import parse_job
from zeus_flows.job_sections.price_section import LARGEST_MB, PricesSection, read_prices

JOB = (
    "name: t\ntrain: {function: a.b:c}\ntarget: {metric: m, value: 1, better: higher}\n"
    "batch_sizes: [8]\ndefault_batch_size: 8\nmax_epochs: 3\n"
)
NOON = 494_652  # 2026-06-06T12:00Z, in hours since 1970

energies = st.just(0.0) | st.floats(1e-3, 1e9)  # no counter tells less than a millijoule
used = st.builds(Used, began_s=st.floats(0, 1e5), time_s=st.floats(0, 3e5), energy_j=energies)


@given(st.lists(used, max_size=5))
def test_at_a_flat_rate_hours_make_no_difference(spans: list[Used]) -> None:
    charged = charge_all(Tariff(EnergyRate(0.28, 380.0), currency="EUR"), spans)
    total = sum(one.energy_j for one in spans)
    assert charged.energy_j == pytest.approx(total)
    assert charged.money == pytest.approx(0.28 * total / KWH_J)
    assert charged.carbon_g == pytest.approx(380.0 * total / KWH_J)
    assert not charged.unpriced
    assert not charged.uncharted


@given(used, st.integers(0, 50))
def test_energy_in_hours_without_a_price_is_not_charged_and_the_hours_are_named(one: Used, gap: int) -> None:
    tariff = Tariff(hours={hour: EnergyRate(1.0) for hour in range(200) if hour != gap}, currency="EUR")
    charged = charge(tariff, one)
    assert charged.energy_j == pytest.approx(one.energy_j)
    assert charged.money == pytest.approx(charged.priced_j / KWH_J)
    assert charged.unpriced <= {gap}
    if not charged.unpriced:
        assert charged.priced_j == pytest.approx(charged.energy_j)
    assert charged.mean.per_kwh is None or charged.mean.per_kwh == pytest.approx(1.0)


def test_a_rate_of_the_day_follows_the_clock_of_its_zone() -> None:
    tariff = Tariff(of_day={14: EnergyRate(0.5), 13: EnergyRate(0.1)}, zone="Europe/Berlin", currency="EUR")
    assert tariff.at(NOON).per_kwh == 0.5  # two hours ahead in summer
    assert tariff.at(NOON + 24 * 183).per_kwh == 0.1  # one in winter


def test_what_no_training_takes_ends_all_the_same() -> None:
    charged = charge(Tariff(EnergyRate(1.0), currency="EUR"), Used(0.0, 1e15, 3.6e6))
    assert charged.money == pytest.approx(1.0)


def section(**keys: object) -> PricesSection:
    return PricesSection.model_validate(keys)


def test_a_file_of_prices_counts_where_it_has_the_hour_and_the_job_file_where_it_has_not(tmp_path: Path) -> None:
    text = "hour,per_kwh,carbon_g_per_kwh\n2026-06-06T14:00+02:00,0.10,\n2026-06-06T13:00,-0.02,55\n"
    (tmp_path / "prices.csv").write_text(text, encoding="utf-8")
    tariff = section(currency="EUR", per_kwh=0.3, carbon_g_per_kwh=400, hourly="prices.csv").tariff(tmp_path)
    assert tariff.at(NOON) == EnergyRate(0.10, 400.0)
    assert tariff.at(NOON + 1) == EnergyRate(-0.02, 55.0)  # markets pay at times
    assert tariff.at(NOON + 2) == EnergyRate(0.3, 400.0)


def test_hours_of_the_day_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    path = tmp_path / "day.csv"
    path.write_text("hour,carbon_g_per_kwh\n" + "".join(f"{h},{h * 10}\n" for h in range(24)), encoding="utf-8-sig")
    hours, of_day = read_prices(path)
    assert not hours
    assert of_day[23] == EnergyRate(None, 230.0)
    assert section().tariff(tmp_path, instead=path).carbon


#: What is wrong, the file, and what is said after its name.
WRONG = {
    "empty": ("", "1: a file of prices needs the column hour"),
    "no hours": ("hour,per_kwh\n", "2: there is no hour"),
    "semicolons": ("hour;per_kwh\n1;2\n", "1: columns are separated by commas"),
    "a column nobody knows": ("hour,price_kwh\n1,2\n", "1: 'price_kwh' is no column of a file of prices; did you mean"),
    "a column twice": ("hour,per_kwh,per_kwh\n1,2,3\n", "1: a column is there twice"),
    "no number": ("hour,per_kwh\n1,cheap\n", "2: per_kwh must be a number such as 0.28, not 'cheap'"),
    "not a number": ("hour,per_kwh\n1,0.1\n2,nan\n", "3: per_kwh must be a number"),
    "no end": ("hour,per_kwh\n1,inf\n", "2: per_kwh must be a number"),
    "negative carbon": ("hour,carbon_g_per_kwh\n1,-5\n", "2: carbon_g_per_kwh must be a number"),
    "an hour twice": ("hour,per_kwh\n2026-01-01T00:00Z,1\n2026-01-01T01:00+01:00,1\n", "3: hour "),
    "half an hour": ("hour,per_kwh\n2026-01-01T00:30Z,1\n", "2: hour must begin a whole hour of UTC"),
    "hours of both kinds": ("hour,per_kwh\n5,1\n2026-01-01T00:00Z,1\n", "3: some hours have a date"),
    "a day of 25 hours": ("hour,per_kwh\n24,1\n", "2: hour 24 is not of a day"),
    "no time": ("hour,per_kwh\nnoon,1\n", "2: hour must be a time such as"),
    "a year that does not exist": ("hour,per_kwh\n99999-01-01T00:00Z,1\n", "2: hour must be a time such as"),
    "too few columns": ("hour,per_kwh\n5\n", "2: the line has not as many columns"),
    "too many columns": ("hour,per_kwh\n5,1,2\n", "2: the line has not as many columns"),
    "a quote that never ends": ('hour,per_kwh\n1,"0.1\n', "not valid CSV"),
    "a control character": ("hour,per_kwh\n\x1b[31m,1\n", "2: hour must be a time such as"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_of_prices_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    text, said = WRONG[name]
    path = tmp_path / "prices.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_prices(path)
    assert f"{path}:" in str(caught.value)
    assert said in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    huge, binary = tmp_path / "huge.csv", tmp_path / "binary.csv"
    with huge.open("wb") as file:
        file.truncate(LARGEST_MB * 2**20 + 1)
    binary.write_bytes(b"hour,per_kwh\n\xff\xfe,1\n")
    for path, said in (
        (huge, "more than 16 MB"),
        (binary, "no text in UTF-8"),
        (tmp_path / "none.csv", "no such file"),
        (tmp_path, "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_prices(path)


def test_a_price_needs_its_currency(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"job file:7: .*needs a currency"):
        parse_job(JOB + "prices: {per_kwh: 0.28}\n")
    with pytest.raises(ConfigError, match="no time zone"):
        parse_job(JOB + "prices: {zone: Berlin}\n")
    (tmp_path / "p.csv").write_text("hour,per_kwh\n1,0.2\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"p\.csv:1: per_kwh needs a currency"):
        section(hourly="p.csv").tariff(tmp_path)
    assert math.isclose(parse_job(JOB + "prices: {per_kwh: 0.28, currency: EUR}\n").prices.per_kwh or 0.0, 0.28)


def test_prices_change_nothing_that_is_decided() -> None:
    plain, priced = parse_job(JOB), parse_job(JOB + "prices: {carbon_g_per_kwh: 380}\n")
    assert plain.core() == priced.core()
    assert plain.fingerprint == priced.fingerprint
