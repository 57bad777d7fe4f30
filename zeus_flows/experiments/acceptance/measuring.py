"""The acceptance test itself: what a GPU's sensors and limits do, and what we cost, each with a verdict."""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from zeus_flows.core.reasons import Reason, ReasonKind
from zeus_flows.core.records import Decision
from zeus_flows.errors import DeviceError, DeviceLost, NotSupported
from zeus_flows.experiments.acceptance.findings import (
    REPORT_IT,
    Acceptance,
    AtLimit,
    Finding,
    Verdict,
    masked,
)
from zeus_flows.experiments.acceptance.loads import GpuLoad
from zeus_flows.experiments.acceptance.put_back import judge_put_back
from zeus_flows.experiments.acceptance.readings import (
    SensorReading,
    judge_counter,
    judge_limits,
    judge_spans,
    judge_step,
    median_of,
    scatter_of_spans,
)
from zeus_flows.gpu.device import Device
from zeus_flows.gpu.group import Gpus
from zeus_flows.gpu.journal import is_ours
from zeus_flows.gpu.meter import update_period_s
from zeus_flows.gpu.nvml import Nvml
from zeus_flows.job_file import JobFile
from zeus_flows.job_sections.gpu_section import PowerLimitSection
from zeus_flows.training.session import Session

#: Shares of the time: a steady load, all power limits together, a session's steps.
_STEADY, _LIMITS, _STEPS = 0.30, 0.45, 0.15
#: Share of each that is discarded while the GPU gets used to it.
_WARM_UP = 0.2
#: More limits than these are not tried: each would have too little time.
_MOST_LIMITS = 9

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class AcceptancePlan:
    """What to do.

    Attributes:
        seconds: How long all of it may take, but for the children that end.
        open_gpus: Opens the GPUs that a job would have; the first one is measured.
        open_load: Returns a load for the GPU of a UUID.
        state_dir: Where the journal of power limits is.
        children: Whether to try that limits come back after children end.
        sleep: Waits on the clock of the GPUs.
    """

    seconds: float
    open_gpus: Callable[[], Gpus]
    open_load: Callable[[str], GpuLoad]
    state_dir: Path
    children: bool = True
    sleep: Callable[[float], None] = time.sleep


def measure(plan: AcceptancePlan, say: Say) -> Acceptance:
    """Measure a GPU and judge what was found; the power limit is afterwards what it was before.

    Args:
        plan: What to do.
        say: Tells people how far it is.

    Raises:
        DeviceError: there is no GPU, or it left the bus.
    """
    with ExitStack() as held:
        return _measure(plan, say, held)


def _measure(plan: AcceptancePlan, say: Say, held: ExitStack) -> Acceptance:
    with plan.open_gpus() as gpus:
        held.callback(Nvml().close)  # a driver that nobody uses forgets its limits, where persistence mode is off
        device = gpus.devices[0]
        before_w = device.power_limit_w()
        about = _about(gpus, plan)
        uuid, limits_w, can_set, why_not = device.uuid, gpus.power.limits_w, gpus.power.can_set, gpus.power.why_not
        can_set = can_set and gpus.power.has_limits
    say(f"{about['GPU']}, driver {about['driver']}: about {plan.seconds / 60:.1f} min")
    findings = list[Finding]()
    if can_set and plan.children and len(limits_w) > 1:
        say("[1/4] does the limit come back? Three children set one and end; of the killed one a warning is expected")
        findings += judge_put_back(uuid, limits_w, plan.state_dir)
    elif plan.children:
        why = why_not or "the GPU has no power limits"
        findings.append(Finding("the limit comes back", Verdict.CANNOT_TELL, why, "no limit is set on this GPU"))
    load = plan.open_load(uuid)
    about["load"] = load.name
    with plan.open_gpus() as gpus:
        say(f"[2/4] counter against power, spans ({_STEADY * plan.seconds:.0f} s); load: {load.name}")
        readings = _steady(gpus, load, _STEADY * plan.seconds)
        spans = scatter_of_spans(readings)
        findings.append(judge_counter(readings, loaded=not load.idle))
        findings.append(judge_spans(spans, default_s=PowerLimitSection().profile_seconds))
        say(f"[3/4] what each limit does ({_LIMITS * plan.seconds:.0f} s)")
        rows, finding = _limits(gpus, load, _LIMITS * plan.seconds, say)
        findings.append(finding)
        say(f"[4/4] what we cost per step ({_STEPS * plan.seconds:.0f} s)")
        findings.append(_steps(gpus, load, _STEPS * plan.seconds))
        calls_ms = _calls(gpus)
    findings.append(_left_as_found(plan, before_w))
    shown = tuple(_shown(finding) for finding in findings)
    return Acceptance({name: masked(text) for name, text in about.items()}, shown, rows, spans, calls_ms)


def _shown(finding: Finding) -> Finding:
    return Finding(finding.name, finding.verdict, masked(finding.found), masked(finding.means), masked(finding.todo))


def _about(gpus: Gpus, plan: AcceptancePlan) -> dict[str, str]:
    device = gpus.devices[0]
    low_w, high_w = device.power_limit_range_w()
    power = gpus.power
    return {
        "GPU": device.model,
        "driver": _driver(),
        "power limit": f"{device.power_limit_w():g} W, range {low_w:g}-{high_w:g} W" if power.has_limits else "none",
        "permission": "may set limits" if power.can_set else power.why_not,
        "energy": gpus.sensor,
        "counter updates": _period(device.energy_j, gpus, plan),
        "power updates": _period(device.power_w, gpus, plan),
        "zeus-flows": _version("zeus-flows"),
        "torch": _version("torch"),
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "minutes": f"{plan.seconds / 60:g}",
    }


def _driver() -> str:
    import pynvml

    with suppress(pynvml.NVMLError):
        return str(pynvml.nvmlSystemGetDriverVersion())
    return "not known"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _period(read: Callable[[], float], gpus: Gpus, plan: AcceptancePlan) -> str:
    try:
        period_s = update_period_s(read, gpus.now_s, plan.sleep)
    except DeviceLost:
        raise
    except DeviceError as error:
        return f"cannot be read: {error}"
    return "no new value in 0.5 s" if period_s is None else f"every {1e3 * period_s:.0f} ms"


def _steady(gpus: Gpus, load: GpuLoad, seconds: float) -> list[SensorReading]:
    """Return readings after every step of a load at the limit that there is."""
    device, readings = gpus.devices[0], list[SensorReading]()
    _run(gpus, load, _WARM_UP * seconds)
    until = gpus.now_s() + (1 - _WARM_UP) * seconds
    counts = gpus.sensor == "counter"
    while not readings or gpus.now_s() < until:
        energy_j = device.energy_j() if counts else math.nan
        power_w = _power_w(device)
        readings.append(SensorReading(gpus.now_s(), energy_j, power_w))
        load.step()
    return readings


def _power_w(device: Device) -> float:
    try:
        return device.power_w()
    except NotSupported:
        return math.nan


def _run(gpus: Gpus, load: GpuLoad, seconds: float) -> int:
    """Let a load run for so long; return how many steps it made."""
    until, steps = gpus.now_s() + seconds, 0
    while gpus.now_s() < until:
        load.step()
        steps += 1
    return steps


def _limits(gpus: Gpus, load: GpuLoad, seconds: float, say: Say) -> tuple[tuple[AtLimit, ...], Finding]:
    """Return what each limit does to a load, and the verdict."""
    name, power = "what limits do", gpus.power
    unknown = Verdict.CANNOT_TELL
    if not power.has_limits or len(power.limits_w) < 2:
        return (), Finding(name, unknown, "the GPU has no power limits", "jobs choose the batch size only")
    if not power.can_set:
        return (), Finding(name, unknown, power.why_not, "jobs measure only", "type `zeus-flows doctor`")
    if load.idle:
        todo = "install torch for CUDA, or give a load of your own: `--load module:function`"
        return (), Finding(name, unknown, f"no load ({load.name})", "an idle GPU says nothing about limits", todo)
    device, limits_w, rows = gpus.devices[0], _thinned(power.limits_w), list[AtLimit]()
    each_s = seconds / len(limits_w)
    try:
        for number, limit_w in enumerate(limits_w, start=1):
            left_s = each_s * (len(limits_w) - number + 1)
            say(f"      {limit_w:g} W, {number} of {len(limits_w)}: about {left_s:.0f} s left")
            power.set_limit_w(limit_w)
            read_w = device.power_limit_w()
            if not is_ours(read_w, (limit_w,)):
                rows.append(AtLimit(limit_w, read_w, 0.0, 0.0))
                break
            _run(gpus, load, _WARM_UP * each_s)
            mark = gpus.mark()
            steps = _run(gpus, load, (1 - _WARM_UP) * each_s)
            span = gpus.since(mark)
            rows.append(AtLimit(limit_w, read_w, span.average_power_w, steps / span.time_s, gpus.throttle_reasons()))
            power.limit_w()
            if power.foreign_w is not None:
                return tuple(rows), Finding(name, unknown, power.why_not, "somebody else tunes it", "stop them first")
            if not span.complete:
                means = "a reading failed, went backwards or cannot be true"
                return tuple(rows), Finding(name, unknown, f"no energy at {limit_w:g} W", means, REPORT_IT)
    except DeviceLost:
        raise
    except DeviceError as error:
        return tuple(rows), Finding(name, Verdict.FAIL, str(error), "a limit was refused", REPORT_IT)
    finally:
        power.restore()
    return tuple(rows), judge_limits(rows)


def _thinned(limits_w: tuple[float, ...]) -> tuple[float, ...]:
    """Return at most so many limits, evenly, the greatest and the least among them.

    >>> _thinned(tuple(float(w) for w in range(700, 199, -25)))
    (700.0, 650.0, 575.0, 500.0, 450.0, 400.0, 325.0, 250.0, 200.0)
    """
    if len(limits_w) <= _MOST_LIMITS:
        return limits_w
    step = (len(limits_w) - 1) / (_MOST_LIMITS - 1)
    return tuple(limits_w[round(i * step)] for i in range(_MOST_LIMITS))


def _steps(gpus: Gpus, load: GpuLoad, seconds: float) -> Finding:
    """Return what a session costs a training loop that does the load's steps."""
    file = JobFile.model_validate(
        {
            "name": "acceptance",
            "train": {"function": "none:none"},
            "target": {"metric": "none", "value": 1.0, "better": "higher"},
            "batch_sizes": [1],
            "default_batch_size": 1,
            "max_epochs": 1,
            "mode": "off",
        }
    )
    reason = Reason(ReasonKind.ONLY_ARM, "to be measured")
    decided = Decision(1, 1, 1, reason, seed=0, policy=file.policy, tune_power=False)
    session, outside_s, inside_s = Session(file, file.core(), decided, gpus), list[float](), list[float]()
    for _ in session.epochs():
        batches, until = session.steps(range(10**9)), gpus.now_s() + seconds
        while gpus.now_s() < until:
            asked = time.perf_counter()
            next(batches)
            outside_s.append(time.perf_counter() - asked)
            began_s = gpus.now_s()
            load.step()
            inside_s.append(gpus.now_s() - began_s)
        session.close()
        break
    typical_s = statistics.median(outside_s) if outside_s else 0.0
    return judge_step(sum(outside_s), sum(inside_s), len(outside_s), typical_s)


def _calls(gpus: Gpus) -> Mapping[str, float]:
    """Return what the driver takes for a call, in milliseconds; those it refuses are left out."""
    device = gpus.devices[0]
    calls: dict[str, Callable[[], object]] = {
        "read the counter": device.energy_j,
        "read power": device.power_w,
        "read the limit": device.power_limit_w,
    }
    if gpus.power.can_set:
        limit_w = device.power_limit_w()
        calls["set the limit"] = lambda: device.set_power_limit_w(limit_w)
    took = {}
    for name, call in calls.items():
        with suppress(DeviceError):
            took[name] = round(1e3 * median_of(call, time.perf_counter), 3)
    return took


def _left_as_found(plan: AcceptancePlan, before_w: float) -> Finding:
    name = "the limit after all this"
    with plan.open_gpus() as gpus:
        device = gpus.devices[0]
        after_w = device.power_limit_w()
        if is_ours(after_w, (before_w,)):
            return Finding(name, Verdict.PASS, f"{after_w:g} W, as before", "this command leaves nothing behind")
        todo = f"type `sudo nvidia-smi -i {device.index} -pl {before_w:g}`; {REPORT_IT}"
        return Finding(name, Verdict.FAIL, f"{after_w:g} W, before {before_w:g} W", "it did not come back", todo)
