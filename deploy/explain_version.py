"""`headrace explain v000003`: where a version comes from and what became of it."""

from pathlib import Path

from deploy.config import Config
from deploy.explain import Control, listed, version_words
from learner.candidate import BASE_VERSION, Manifest, StepRecord, read_manifest, version_number
from learner.lineage import read_steps
from rewards import ledger


def tell(config: Config, version: str, control: Control) -> list[str]:
    """Return the lines; none when the version is unknown."""
    manifest = _manifest(config.state_dir, version, control)
    event = control.candidates.get(version)
    steps = steps_of(read_steps(config.state_dir), version, manifest)
    if version == BASE_VERSION and not manifest:
        return [f"version     {version}  the base model {config.run.model}", *children_lines(version, control)]
    if not (manifest or event or steps):
        return [f"version     {version}  unknown here", f"note        {control.problem}"] if control.problem else []
    parent = (manifest.parent if manifest else None) or (event.parent if event else None)
    lines = [f"version     {version}  child of {version_words(parent, control) if parent else 'nothing'}"]
    if event:
        lines.append(
            f"state       {event.state}, said the {event.author or 'learner'}{': ' * bool(event.reason)}{event.reason}"
        )
        lines += [f"evidence    {name} = {value:.6g}" for name, value in sorted(event.evidence.items())]
    lines += _manifest_lines(config, manifest) if manifest else ["manifest    its folder is gone"]
    lines += _learning_lines(config.state_dir, steps, manifest)
    lines += children_lines(version, control)
    if control.problem:
        lines.append(f"note        {control.problem}; its state and gates are not shown")
    return lines


def _manifest(state_dir: Path, version: str, control: Control) -> Manifest | None:
    event = control.candidates.get(version)
    for folder in (state_dir / "candidates" / version, Path(event.folder) if event and event.folder else None):
        try:
            if folder:
                return read_manifest(folder)[0]
        except ValueError:
            continue  # pruned, or elsewhere; the control topic and the steps still know of it
    return None


def _manifest_lines(config: Config, manifest: Manifest) -> list[str]:
    size = sum(file.num_bytes for file in manifest.files)
    code = manifest.code_commit or "unknown"
    lines = [f"weights     {manifest.kind}, {len(manifest.files)} files, {size / 1e6:.0f} MB, code {code}"]
    lines += [f"metric      {name} = {value:.6g}" for name, value in sorted(manifest.metrics.items())]
    if manifest.mlflow_run_id:
        lines.append(f"mlflow run  tag headrace.run = {manifest.mlflow_run_id} at {config.mlflow.tracking_uri}")
    return lines


def _learning_lines(state_dir: Path, steps: list[StepRecord], manifest: Manifest | None) -> list[str]:
    """Return the steps since the parent, their samples, and the feedback behind them."""
    sample_ids = [name for step in steps for name in step.sample_ids]
    inference_ids = sorted({name.rpartition("@")[0] for name in sample_ids})
    feedback = {
        item.get("feedback_id")
        for inference_id in inference_ids
        for verdict in ledger.why(state_dir, inference_id)
        for item in verdict["feedback"]
    }
    lines = [
        f"steps       {listed([str(step.step) for step in steps]) or 'none of its own'}",
        f"samples     {len(sample_ids)} from {len(inference_ids)} answers, with {len(feedback)} pieces of feedback",
    ]
    if sample_ids:
        lines.append(f"  such as   {listed(sample_ids[:3])}")
    if manifest:
        lines.append(f"  in all    {manifest.num_samples} samples since the base model")
    return lines


def steps_of(steps: list[StepRecord], version: str, manifest: Manifest | None) -> list[StepRecord]:
    """Return the steps that went into this version and not into its parent."""
    own = [step for step in steps if step.next_version == version]
    if manifest and manifest.lineage:
        own = [step for step in own if step.lineage == manifest.lineage and step.step <= manifest.step]
    return own


def children_lines(version: str, control: Control) -> list[str]:
    """Return the versions that were made from this one."""
    children = [name for name, event in control.candidates.items() if event.parent == version]
    children.sort(key=version_number)
    return [f"children    {listed([version_words(name, control) for name in children])}"] if children else []
