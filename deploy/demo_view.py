"""The demo's live view: a rich panel on a terminal, a plain line every few seconds elsewhere."""

import sys
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deploy.demo_pulse import Beat

PLAIN_EVERY_S = 5.0
_BARS = " ▁▂▃▄▅▆▇█"


def share(value: float | None) -> str:
    """Show a share as per cent."""
    return "-" if value is None else f"{100 * value:.0f} %"


def evidence_text(beat: Beat) -> str:
    """Show how far the canary's evidence is."""
    if not beat.canary:
        return "no canary"
    known = "" if beat.evidence is None else f" E {beat.evidence:.3g}"
    wanted = "" if beat.threshold is None else f" of {beat.threshold:.3g}"
    return f"{beat.canary} at {100 * beat.canary_weight:.0f} %,{known}{wanted}, {beat.num_units} units"


def plain_line(beat: Beat) -> str:
    """Show a beat on one line."""
    lags = " ".join(f"{name}:{lag}" for name, lag in beat.lags.items() if lag)
    parts = [
        f"{int(beat.elapsed_s) // 60:02d}:{int(beat.elapsed_s) % 60:02d}",
        f"{beat.phase:<8}",
        f"serving {beat.champion or '-'}",
        f"satisfied {share(beat.true_share)} (votes {share(beat.observed_share)})",
        f"{beat.requests_per_s:.1f} req/s, {beat.num_answers} answers, {beat.num_votes} votes",
        f"step {beat.step}" + ("" if beat.kl is None else f" KL {beat.kl:.3f}") + f" backlog {beat.backlog}",
        evidence_text(beat),
        f"{beat.num_promotions} promoted, {beat.num_rejected} refused",
    ]
    if lags:
        parts.append(f"lag {lags}")
    if beat.num_failed:
        parts.append(f"{beat.num_failed} FAILED")
    if beat.down:
        parts.append(f"silent: {', '.join(beat.down)}")
    return " | ".join(parts)


def sparkline(values: list[float | None], width: int = 60) -> str:
    """Draw shares in [0, 1] as one line of bars, the latest on the right."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    every = max(1, -(-len(known) // width))
    return "".join(_BARS[round(8 * min(1.0, max(0.0, value)))] for value in known[::-every][::-1])


def panel(beats: list[Beat], news: list[str]) -> Panel:
    """Draw the whole view from all beats so far."""
    beat = beats[-1]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    lags = "  ".join(f"{name} {lag}" for name, lag in beat.lags.items())
    learning = f"step {beat.step}   backlog {beat.backlog}"
    learning += "" if beat.reward is None else f"   reward {beat.reward:+.2f}"
    learning += "" if beat.kl is None else f"   KL to champion {beat.kl:.3f}"
    for name, value in (
        ("serving", beat.champion or "-"),
        ("satisfied", f"true {share(beat.true_share)}   votes {share(beat.observed_share)}"),
        ("", sparkline([each.true_share for each in beats])),
        ("traffic", f"{beat.requests_per_s:.1f} requests/s, {beat.open_requests} open, {beat.num_failed} failed"),
        ("events", f"{beat.num_answers} answers, {beat.num_votes} votes"),
        ("lag", lags or "-"),
        ("learner", learning),
        ("canary", evidence_text(beat)),
        ("gate", f"{beat.num_promotions} promoted, {beat.num_rejected} refused, {beat.num_swaps} swaps"),
    ):
        table.add_row(name, value)
    if beat.down:
        table.add_row("silent", Text(", ".join(beat.down), style="red"))
    clock = f"{int(beat.elapsed_s) // 60:02d}:{int(beat.elapsed_s) % 60:02d}"
    return Panel(Group(table, Text("\n".join(news[-6:]), style="dim")), title=f"Headrace demo  {clock}  {beat.phase}")


class View:
    """Shows beats and news; `with View() as view`."""

    def __init__(self, live: bool | None = None):
        self.console = Console(highlight=False)
        self.live = Live(console=self.console, refresh_per_second=4) if self._wants_live(live) else None
        self.news: list[str] = []
        self._last_plain_s = float("-inf")

    def _wants_live(self, live: bool | None) -> bool:
        return (sys.stdout.isatty() and self.console.is_terminal) if live is None else live

    def __enter__(self) -> "View":
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()

    def say(self, message: str) -> None:
        """Tell one piece of news."""
        self.news.append(message)
        if not self.live:
            print(message, flush=True)

    def show(self, beats: list[Beat]) -> None:
        """Show the latest beat."""
        if self.live:
            self.live.update(panel(beats, self.news))
        elif beats[-1].elapsed_s - self._last_plain_s >= PLAIN_EVERY_S:
            self._last_plain_s = beats[-1].elapsed_s
            print(plain_line(beats[-1]), flush=True)
