"""The demo's curves as a PNG: satisfaction over time and by version, canary evidence, the learner's reward and KL."""

import io
from typing import NamedTuple

from deploy.demo_client import Answer
from deploy.demo_pulse import Beat


class Mark(NamedTuple):
    """A promotion (or refusal) on the time axis."""

    elapsed_s: float
    version: str
    state: str


def by_version(answers: list[Answer], least: int = 10) -> list[tuple[str, float, int]]:
    """Return (version, true share, number of answers) of the traffic, in order of version."""
    groups: dict[str, list[bool]] = {}
    for answer in answers:
        if answer.purpose == "traffic" and not answer.error:
            groups.setdefault(answer.version, []).append(answer.satisfied)
    return [
        (version, sum(group) / len(group), len(group))
        for version, group in sorted(groups.items())
        if len(group) >= least
    ]


def draw(beats: list[Beat], marks: list[Mark], answers: list[Answer]) -> bytes:
    """Draw four panels and return the PNG."""
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    figure = Figure(figsize=(11, 8), dpi=100, layout="constrained")
    satisfaction, versions, evidence, learner = figure.subplots(2, 2).flat
    minutes = [beat.elapsed_s / 60 for beat in beats]
    for values, label in (
        ([beat.true_share for beat in beats], "true"),
        ([beat.observed_share for beat in beats], "observed votes"),
    ):
        satisfaction.plot(minutes, [float("nan") if value is None else 100 * value for value in values], label=label)
    satisfaction.set(title="Satisfied users, last 60", xlabel="minutes", ylabel="%", ylim=(0, 100))
    for mark in marks:
        color = "tab:green" if mark.state == "promoted" else "tab:red"
        for axes in (satisfaction, evidence):
            axes.axvline(mark.elapsed_s / 60, color=color, linewidth=0.8, linestyle="--")
        satisfaction.annotate(mark.version, (mark.elapsed_s / 60, 2), rotation=90, fontsize=7, color=color)
    satisfaction.legend(loc="upper left")
    shares = by_version(answers)
    bars = versions.bar([version for version, _, _ in shares], [100 * value for _, value, _ in shares])
    versions.bar_label(bars, [f"n={count}" for _, _, count in shares], fontsize=7)
    versions.tick_params(axis="x", rotation=45)
    versions.set(title="Truly satisfied, by version (traffic)", ylabel="%", ylim=(0, 105))
    points = [
        (beat.elapsed_s / 60, max(beat.evidence, 1e-3)) for beat in beats if beat.canary and beat.evidence is not None
    ]
    evidence.plot([x for x, _ in points], [y for _, y in points], ".", markersize=3, label="E of the canary")
    limits = [(beat.elapsed_s / 60, beat.threshold) for beat in beats if beat.canary and beat.threshold]
    evidence.plot([x for x, _ in limits], [y for _, y in limits], ".", markersize=2, color="gray", label="threshold")
    evidence.set(title="Evidence for promotion", xlabel="minutes", yscale="log")
    evidence.legend(loc="upper left", fontsize=8)
    _plot_learner(learner, beats)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _plot_learner(axes, beats: list[Beat]) -> None:
    minutes = [beat.elapsed_s / 60 for beat in beats]  # not steps: a refusal takes the learner back to an earlier one
    rewards = [float("nan") if beat.reward is None else beat.reward for beat in beats]
    axes.plot(minutes, rewards, color="tab:blue")
    axes.set(title="Learner", xlabel="minutes", ylabel="mean reward")
    axes.yaxis.label.set_color("tab:blue")
    other = axes.twinx()
    other.plot(minutes, [float("nan") if beat.kl is None else beat.kl for beat in beats], color="tab:orange")
    other.set_ylabel("KL to champion, nats per token", color="tab:orange")
