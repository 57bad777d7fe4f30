"""Kilowatt hours, hours, money and carbon as people read them, rounded to what their doubt leaves."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Final

from zeus_flows.core.job_report import Estimate
from zeus_flows.core.prices import EnergyRate
from zeus_flows.reporting.savings import with_doubt

_KWH: Final = ((1e6, "GWh"), (1e3, "MWh"), (1.0, "kWh"), (1e-3, "Wh"))
_KG: Final = ((1e3, "t"), (1.0, "kg"), (1e-3, "g"))
_HOURS: Final = ((1.0, "h"), (1 / 60, "min"), (1 / 3600, "s"))


def kwh_text(value: float | Estimate) -> str:
    """Return an energy in kilowatt hours.

    >>> kwh_text(Estimate(0.375, 0.258, 0.492)), kwh_text(1234.0), kwh_text(0.0)
    ('375 Wh ± 117', '1.23 MWh', '0 Wh')
    """
    return _text(value, _KWH)


def carbon_text(value: float | Estimate) -> str:
    """Return an amount of CO2, in kilograms.

    >>> carbon_text(Estimate(0.1425, 0.1, 0.185))
    '142 g ± 42'
    """
    return _text(value, _KG)


def hours_text(value: float | Estimate) -> str:
    """Return a duration in hours.

    >>> hours_text(Estimate(2.5, 2.0, 3.0)), hours_text(0.25)
    ('2.50 h ± 0.50', '15 min')
    """
    return _text(value, _HOURS)


def _text(value: float | Estimate, units: tuple[tuple[float, str], ...]) -> str:
    if isinstance(value, Estimate):
        return with_doubt(value.amount, value.half, units)
    return with_doubt(value, 0.0, units)


def money_text(value: float | Estimate, currency: str) -> str:
    """Return an amount of money: cents, and less than that where it is little.

    >>> money_text(Estimate(0.106, 0.072, 0.138), "EUR"), money_text(Estimate(12345.6, 11000.0, 13600.0), "USD")
    ('0.11 EUR ± 0.03', '12,346 USD ± 1,300')
    >>> money_text(0.00123, "EUR"), money_text(0.0, "EUR")
    ('0.0012 EUR', '0.00 EUR')
    """
    amount, half = (value.amount, value.half) if isinstance(value, Estimate) else (value, 0.0)
    greatest = max(abs(amount), half)
    decimals = 0 if greatest >= 1000 else 2
    if 0 < greatest < 0.05:
        decimals = min(1 - math.floor(math.log10(greatest)), 6)
    text, doubt = f"{amount:,.{decimals}f}", f"{half:,.{decimals}f}"
    text = text.removeprefix("-") if not float(text.replace(",", "")) else text
    return f"{text} {currency}".rstrip() + (f" ± {doubt}" if float(doubt.replace(",", "")) else "")


def share_text(value: Estimate) -> str:
    """Return a share, in percent.

    >>> share_text(Estimate(49.3, 33.8, 64.8)), share_text(Estimate(-0.2, -0.2, -0.2))
    ('49 % ± 16', '0 %')
    """
    text, doubt = f"{value.amount:.0f}", f"{value.half:.0f}"
    return f"{'0' if text == '-0' else text} %" + (f" ± {doubt}" if doubt != "0" else "")


def rate_text(rate: EnergyRate, currency: str) -> str:
    """Return what a kilowatt hour costs and emits.

    >>> rate_text(EnergyRate(0.28, 380.0), "EUR"), rate_text(EnergyRate(None, 380.0), "")
    ('0.280 EUR and 380 g of CO2', '380 g of CO2')
    """
    parts = [] if rate.per_kwh is None else [f"{rate.per_kwh:.3f} {currency}"]
    parts += [] if rate.carbon_g_per_kwh is None else [f"{rate.carbon_g_per_kwh:.0f} g of CO2"]
    return " and ".join(parts) or "not known"


def hour_text(hour: int) -> str:
    """Return an hour since 1970.

    >>> hour_text(0)
    '1970-01-01 00:00'
    """
    return f"{datetime.fromtimestamp(hour * 3600, UTC):%Y-%m-%d %H:%M}"
