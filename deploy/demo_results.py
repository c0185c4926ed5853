"""The demo's results: curves as PNG (also in MLflow), fluency under the base, summary.json, the printed tables."""

import asyncio
import json
import sys
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from deploy.books import held_by
from deploy.demo_bad import count_exposure
from deploy.demo_client import Answer
from deploy.demo_measure import Gain, Guard, paired_gain, quality_guard
from deploy.demo_plot import Mark, by_version, draw
from deploy.demo_report import (
    Criterion,
    checks_table,
    criteria_table,
    feedback_latency,
    judge_run,
    summary,
)
from deploy.model import find
from ingest.log import query
from learner.lineage import steps_of_candidate
from learner.tracking import Tracker

if TYPE_CHECKING:
    from deploy.demo_run import Demo

SCORED_TOKENS = 24  # of each answer


def log_curves(demo: "Demo") -> None:
    """Draw the curves into the state folder and into MLflow, while its server still runs."""
    png = draw(demo.timeline.beats, marks_of(demo), demo.client.answers)
    (demo.options.state_dir / "demo" / "curves.png").write_bytes(png)
    if not demo.config.mlflow.tracking_uri:
        return
    tracker = Tracker(demo.config.mlflow, demo.options.state_dir, "demo")
    tracker.start_run("demo", {"seed": demo.options.seed, "minutes": demo.options.minutes}, {"process": "demo"})
    if demo.base and demo.champion:
        gain = paired_gain(demo.base, demo.champion)
        tracker.log_metrics({"satisfied/base": gain.base, "satisfied/champion": gain.champion}, step=0)
    tracker.log_figure("curves.png", png)
    tracker.close()


def marks_of(demo: "Demo") -> list[Mark]:
    """Return promotions and refusals on the demo's clock."""
    return [
        Mark(event.at - demo.started_at, event.version, event.state)
        for event in demo.watch.events
        if event.state in ("promoted", "rejected", "rolled_back") and event.at >= demo.started_at
    ]


async def score_fluency(demo: "Demo") -> tuple[dict[str, float], dict[str, float]] | None:
    """Return question -> mean log-prob per token under the base model, for the base's and the champion's answers.

    Scored on the tokens as served, from the archive: at most the first SCORED_TOKENS, so that long and short answers
    compare, and without the end token, for how long an answer is says nothing of its words.
    """
    state_dir = demo.options.state_dir
    answers = [answer for side in (demo.base, demo.champion) for answer in side.values()]
    rows = query(
        state_dir,
        "SELECT inference_id, tokens.prompt_ids AS prompt_ids, tokens.completion_ids AS completion_ids, finish_reason "
        "FROM inference WHERE tokens IS NOT NULL AND inference_id IN (SELECT unnest(?))",
        [[answer.inference_id for answer in answers]],
    )
    if not rows:
        return None
    for row in rows:
        last = -1 if row["finish_reason"] == "stop" else None
        row["completion_ids"] = row["completion_ids"][:last][:SCORED_TOKENS]
    folder = state_dir / "demo"
    (folder / "to_score.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "learner.score", "--model", str(find(demo.config.run.model))),
        *("--input", str(folder / "to_score.jsonl"), "--output", str(folder / "scored.jsonl")),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await process.communicate()
    if process.returncode != 0:
        print(f"fluency was not scored: {err.decode(errors='replace')[-500:]}", file=sys.stderr)
        return None
    scored = [json.loads(line) for line in (folder / "scored.jsonl").read_text().splitlines()]
    means = {row["inference_id"]: row["mean_logprob"] for row in scored if row["mean_logprob"] is not None}
    base, champion = (
        {text: means[answer.inference_id] for text, answer in side.items() if answer.inference_id in means}
        for side in (demo.base, demo.champion)
    )
    return base, champion


def inferences_used(promoted: list[str], demo: "Demo") -> dict[str, set[str]]:
    """Return promoted version -> inference ids of the samples that its whole line of descent used."""
    held = held_by(demo.options.state_dir)
    used: dict[str, set[str]] = {}
    for version in promoted:
        try:
            steps = steps_of_candidate(demo.options.state_dir, version)
        except ValueError:
            continue  # its folder has been cleared: no claim about it
        sample_ids = {sample_id for step in steps for sample_id in step.sample_ids}
        used[version] = {held.samples[sample_id] for sample_id in sample_ids if sample_id in held.samples}
    return used


async def finish(demo: "Demo") -> list[Criterion]:
    """Judge the run, print the tables, write summary.json."""
    answers, votes = demo.client.answers, demo.client.votes
    gain: Gain | None = None
    guard: Guard | None = None
    if demo.base.keys() & demo.champion.keys():
        gain = paired_gain(demo.base, demo.champion)
        guard = quality_guard(demo.questions, demo.base, demo.champion, await score_fluency(demo))
    if demo.planted:
        count_exposure(demo.planted, answers)
    promotions = [event for event in demo.watch.promoted() if event.at >= demo.started_at]
    promoted = [event.version for event in promotions]
    times_s = [event.at - demo.started_at for event in promotions]
    latency = feedback_latency(votes, answers, promoted, inferences_used(promoted, demo))
    criteria = judge_run(times_s, gain, guard, answers, demo.kills, demo.checks, demo.planted)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(checks_table(demo.checks))
    console.print(criteria_table(criteria))
    if latency:
        console.print(
            f"feedback to the first answer that had learned from it: median {latency.median_s:.0f} s, "
            f"p90 {latency.p90_s:.0f} s ({latency.num_feedback} feedback events)"
        )
    versions = ", ".join(f"{version} {100 * value:.0f} % of {count}" for version, value, count in by_version(answers))
    console.print(f"truly satisfied traffic by version: {versions or 'none'}")
    document = summary(
        criteria,
        gain=gain,
        guard=guard,
        latency=latency,
        promotions=[{"version": event.version, "at_s": at} for event, at in zip(promotions, times_s, strict=True)],
        versions=[list(entry) for entry in by_version(answers)],
        kills=demo.kills,
        planted=demo.planted,
        checks=[{**check._asdict(), "ok": check.ok} for check in demo.checks],
        num_answers=len(answers),
        num_votes=len(votes),
        num_samples=len(query(demo.options.state_dir, "SELECT sample_id FROM sample")),
    )
    path = demo.options.state_dir / "demo" / "summary.json"
    path.write_text(json.dumps(document, indent=1, default=msgspec.to_builtins))
    examples(demo, console)
    console.print(f"curves {path.with_name('curves.png')}\nsummary {path}")
    return criteria


def examples(demo: "Demo", console: Console, num: int = 3) -> None:
    """Print a few held-out questions with both answers."""
    for text in list(demo.base.keys() & demo.champion.keys())[:num]:
        console.print(f"\n[bold]{text}[/]")
        for name, side in (("base", demo.base), ("champion", demo.champion)):
            console.print(f"  {name:<9}{_one_line(side[text])}", markup=False)


def _one_line(answer: Answer) -> str:
    text = " ".join(answer.text.split())
    verdict = "satisfied" if answer.satisfied else answer.fault
    return f"{text[:160]}{'..' if len(text) > 160 else ''}  ({verdict})"
