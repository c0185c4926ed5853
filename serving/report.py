"""Gate evidence in MLflow: one run per candidate, its offline checks, its e-values over time as metrics and a figure.

Takes the conductor once a second. Promises: no verdict depends on it; MLflow may be away. A figure costs the loop a
second, once per canary.
"""

import io
import math

from ingest.config import MlflowConfig, RunConfig
from learner.candidate import BASE_VERSION
from learner.tracking import Tracker
from serving.conductor import Conductor

_EVERY_S = 5.0
_OPEN_STATES = ("proposed", "shadow", "canary")
_SERIES = ("log_e_promote", "log_e_outcome", "log_e_errors", "log_e_mismatch")


class Report:
    """What was already told to MLflow."""

    def __init__(self, mlflow: MlflowConfig, run: RunConfig) -> None:
        self._tracker = Tracker(mlflow, run.state_dir, "controller")
        self._version = ""
        self._champion = ""
        self._logged_at = 0.0
        self._points: list[dict[str, float]] = []

    def look(self, conductor: Conductor, now_s: float) -> None:
        """Tell what is new."""
        state = conductor.state
        if self._version and state.versions[self._version].state not in _OPEN_STATES:
            if self._points:
                self._log_canary(conductor, self._points[-1]["age_s"] + 1.0)  # the figures of the last verdict
            self._end(state.versions[self._version].state)
        current = state.rollout.version if state.rollout else next(iter(conductor.checks), "")
        if current and current != self._version:
            self._begin(current)
            metrics = {f"offline/{check.name}": check.value for check in conductor.checks.pop(current, ())}
            self._log({name: value for name, value in metrics.items() if math.isfinite(value)}, 0)
        if state.rollout and state.rollout.version == self._version and now_s - self._logged_at >= _EVERY_S:
            self._logged_at = now_s
            self._log_canary(conductor, now_s - state.rollout.started_at)
        if state.champion != self._champion:
            self._champion = state.champion
            if self._champion != BASE_VERSION:
                self._tracker.set_alias("champion", self._champion)

    def _begin(self, version: str) -> None:
        if self._version:
            self._end("superseded")
        self._version, self._points = version, []
        self._tracker.start_run(f"gate {version}", {"version": version}, {"version": version, "kind": "gate"})
        self._tracker.set_alias("candidate", version)

    def _log(self, metrics: dict[str, float], step: int) -> None:
        if metrics:
            self._tracker.log_metrics(metrics, step)

    def _log_canary(self, conductor: Conductor, age_s: float) -> None:
        if conductor.verdict is None:
            return
        figures = {name: value for name, value in conductor.verdict.figures.items() if math.isfinite(value)}
        self._points.append({"age_s": age_s, **figures})
        self._log({f"canary/{name}": value for name, value in figures.items()}, int(age_s))

    def _end(self, outcome: str) -> None:
        if self._points:
            self._tracker.log_figure(f"canary-{self._version}.png", draw(self._points, f"{self._version}: {outcome}"))
        self._tracker.end_run()
        self._version, self._points = "", []

    def close(self) -> None:
        self._tracker.close()


def draw(points: list[dict[str, float]], title: str) -> bytes:
    """Return a PNG of the e-values over the age of a canary, with what promotion needs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ages = [point["age_s"] for point in points]
    for name in _SERIES:
        axes.plot(ages, [point.get(name, 0.0) / math.log(10) for point in points], label=name.removeprefix("log_"))
    axes.axhline(math.log10(points[-1]["threshold"]), color="grey", linestyle="--", label="promotion needs")
    axes.set(xlabel="age of the canary (s)", ylabel="log10 E", title=title)
    axes.legend(fontsize="small")
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110)
    return png.getvalue()
