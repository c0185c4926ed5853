"""Configuration of serving (contract): gateway and engines in one table, [serving]; the gate has [serving.gate]."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from ingest.config import StrictModel
from serving.gate_config import GateConfig


class ServingConfig(StrictModel):
    """[serving]"""

    host: str = Field("127.0.0.1", description="where clients reach the gateway")
    port: int = Field(8100, ge=1, le=65535, description="the gateway's public port")
    admin_port: int = Field(8110, ge=1, le=65535, description="/internal/routes, always on loopback")
    gateway_urls: list[str] = Field([], description="admin listeners the controller drains; empty: this machine's one")

    keys_file: Path | None = Field(
        None, description="TOML or JSON: key sha256 -> tenant, scopes; unset: open, one tenant"
    )
    pseudonym_file: Path | None = Field(None, description="HMAC key of user ids; unset: <state>/serving/pseudonym.key")
    metrics: list[str] = Field([], description="feedback metrics that are accepted; empty: any name")

    max_body_bytes: int = Field(4 << 20, ge=1024, description="a larger request body is refused with 413")
    max_choices: int = Field(64, ge=1, le=1024, description="largest n times prompts of one request")
    max_feedback_items: int = Field(1000, ge=1, description="largest feedback batch")
    request_timeout_s: float = Field(600.0, gt=0, description="one generation, from send to last byte")
    connect_timeout_s: float = Field(3.0, gt=0, description="to an engine")
    reroute_wait_s: float = Field(1.0, ge=0, description="a lost champion: wait this long for a newer route table")
    feedback_timeout_s: float = Field(5.0, gt=0, description="to a broker acknowledgement; then the disk spool")
    drain_timeout_s: float = Field(10.0, ge=0, description="at shutdown, answers in flight may take this long")
    standby_fallback: bool = Field(True, description="the previous champion answers while the champion engine is gone")

    engines: dict[str, int] = Field({"blue": 8101, "green": 8102}, description="engine name -> its loopback port")
    attach: dict[str, str] = Field({}, description="engine name -> URL of a vLLM server that is already running")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: float32 on a CPU without bf16 units"
    )
    max_model_len: int = Field(2048, ge=16, description="tokens of prompt and answer together")
    max_num_seqs: int = Field(64, ge=1, description="requests that an engine computes at a time")
    cpu_kvcache_gb: int = Field(1, ge=1, description="GiB of KV cache of one engine on a CPU")
    cpu_threads: int = Field(0, ge=0, description="threads of one engine on a CPU; 0: all cores")
    extra_args: list[str] = Field([], description="further arguments of the vLLM server")
    start_timeout_s: float = Field(300.0, gt=0, description="an engine must answer /health this long after its start")

    gate: GateConfig = GateConfig.model_validate({})

    @field_validator("engines")
    @classmethod
    def _some_engine(cls, engines: dict[str, int]) -> dict[str, int]:
        if len(engines) < 1 or len(set(engines.values())) != len(engines):
            raise ValueError("name at least one engine, each with a port of its own")
        return engines
