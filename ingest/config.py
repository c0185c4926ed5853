"""Configuration of the run, Kafka and ingest (contract): frozen, strict; one TOML per deployment, a table per room."""

import hashlib
import tomllib
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class StrictModel(BaseModel):
    """A frozen configuration table; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


M = TypeVar("M", bound=StrictModel)


class RunConfig(StrictModel):
    """[run]"""

    state_dir: Path = Field(Path(".headrace"), description="every room keeps its durable state below this folder")
    name: str = Field("headrace", description="public model name that clients ask for")
    model: str = Field(..., min_length=1, description="base model: a folder or a Hugging Face id")


class KafkaConfig(StrictModel):
    """[kafka]"""

    bootstrap_servers: str = Field("127.0.0.1:9092", description="host:port[,host:port]")
    topic_prefix: str = Field("", description="put before every topic name")
    partitions: int = Field(8, ge=1, le=1024, description="per topic; fixed once the topics exist")
    replication_factor: int = Field(1, ge=1)
    security_protocol: str = Field("PLAINTEXT", pattern="^(PLAINTEXT|SSL|SASL_PLAINTEXT|SASL_SSL)$")
    sasl_mechanism: str | None = None
    sasl_username: str | None = None
    sasl_password: str | None = None
    ssl_cafile: str | None = None
    linger_ms: int = Field(10, ge=0, le=1000)
    max_buffered_bytes: int = Field(64 << 20, ge=1 << 16, description="producer memory bound; above it events spool")
    max_spool_bytes: int = Field(1 << 30, ge=0, description="disk spool bound; then events are dropped and counted")


class IngestConfig(StrictModel):
    """[ingest]"""

    observation_window_s: float = Field(1800.0, gt=0, description="W_o: from exposure to the final interaction")
    late_window_s: float = Field(86400.0, gt=0, description="W_a: feedback up to here corrects; later expires")
    orphan_window_s: float = Field(600.0, gt=0, description="feedback waits this long for its inference, then expires")
    max_future_s: float = Field(300.0, gt=0, description="an event dated further ahead is quarantined")
    poll_records: int = Field(500, ge=1)
    archive_rows: int = Field(2000, ge=1, description="a Parquet segment is cut at this many rows")
    archive_interval_s: float = Field(10.0, gt=0, description="or at this age")


class MlflowConfig(StrictModel):
    """[mlflow]"""

    tracking_uri: str = Field("http://127.0.0.1:5000", description="empty: tracking is off")
    experiment: str = "headrace"
    registered_model: str = "headrace"


def read_toml(path: Path) -> dict:
    """Read a configuration file; ValueError says where it is broken."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"configuration file {path} does not exist; see deploy/local.toml for an example") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error


def load_table(path: Path, table: str, kind: type[M]) -> M:
    """Load one table of a configuration file; ValueError names each bad key, its value and the allowed ones."""
    document = read_toml(path)
    try:
        return kind.model_validate(document.get(table, {}))
    except ValidationError as error:
        raise ValueError(explain_invalid(path, table, kind, error)) from error


def explain_invalid(path: Path, table: str, kind: type[StrictModel], error: ValidationError) -> str:
    """Return one line per problem: where it is, what is wrong, what is allowed."""
    lines = []
    for problem in error.errors():
        where = ".".join(str(part) for part in (table, *problem["loc"]))
        if problem["type"] == "extra_forbidden":
            known = ", ".join(sorted(kind.model_fields))
            lines.append(f"{path}: unknown key {where}; known keys of [{table}]: {known}")
        elif problem["type"] == "missing":
            lines.append(f"{path}: {where} is missing; set it in [{table}]")
        else:
            lines.append(f"{path}: {where} = {problem.get('input')!r}: {problem['msg']}")
    return "\n".join(lines)


def config_hash(path: Path) -> str:
    """Return 12 hex digits that identify the resolved content of a configuration file."""
    import json

    return hashlib.sha256(json.dumps(read_toml(path), sort_keys=True, default=str).encode()).hexdigest()[:12]
