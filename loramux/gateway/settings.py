"""Settings of the gateway and of the engine it starts: a flag beats a `LORAMUX_*` variable, which beats the TOML file."""

from __future__ import annotations

import difflib
import ipaddress
import os
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, InitSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from loramux.errors import StartupFailed

ENV_PREFIX = "LORAMUX_"
OTHER_VARIABLES = frozenset({"ADMIN_KEY", "URL", "CONFIG", "DEMO_MODEL", "TARGET"})
"""Variables with the prefix that are no settings of `serve`."""

Port = Annotated[int, Field(ge=0, le=65535)]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def default_data_dir() -> Path:
    """`$LORAMUX_DATA_DIR`, else `loramux` under `$XDG_DATA_HOME` or the platform's place for a user's data."""
    if own := os.environ.get("LORAMUX_DATA_DIR"):
        return Path(own)
    if shared := os.environ.get("XDG_DATA_HOME"):
        return Path(shared) / "loramux"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "loramux"
    return Path.home() / ".local" / "share" / "loramux"


class Settings(BaseSettings):
    """One field per flag of `loramux serve`; a field's description is the flag's help."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    model: str = Field(min_length=1, description="A checkpoint's directory, or a GGUF file.")
    served_model_name: str | None = Field(None, min_length=1, description="The base's name in the API; the checkpoint's own if not given.")
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: Port = Field(8000, description="Port to listen on; 0 takes a free one.")
    store_url: str = Field("embedded", description="`embedded`, or a Redis-protocol server: redis://..., rediss://..., unix://...")
    data_dir: Path = Field(default_factory=default_data_dir, description="Where the store, adapter contents and caches are kept.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto, cpu or cuda.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field("auto", description="auto, bfloat16, float16 or float32.")
    quantization: Literal["int8"] | None = Field(None, description="int8 keeps the base's weights in 8 bits; adapters stay in the dtype.")
    max_model_len: PositiveInt | None = Field(None, description="Tokens of prompt and completion together.")
    kv_cache_gib: PositiveFloat | None = Field(
        None, description="For KV blocks; an eighth of the machine's memory, at most 4, if not given."
    )
    max_num_seqs: PositiveInt = Field(64, description="Sequences that run at a time.")
    max_num_batched_tokens: PositiveInt = Field(512, description="Token budget of one step.")
    max_loras: PositiveInt = Field(8, description="Adapters in use at a time.")
    max_lora_rank: PositiveInt = Field(64, description="The largest rank accepted.")
    lora_host_gib: PositiveFloat = Field(2.0, description="Host memory for adapters.")
    lora_memory_gib: PositiveFloat | None = Field(
        None, description="Device memory for adapters, on CUDA; room for the largest in every slot if not given."
    )
    num_threads: PositiveInt | None = Field(None, description="Threads of the engine; one per core if not given.")
    adapter_root: Annotated[list[Path], NoDecode] = Field([], description="A directory that adapters may be read from; may be repeated.")
    request_timeout: PositiveFloat = Field(600.0, description="Seconds a request may take; also the longest drain on SIGTERM.")
    max_body_mib: PositiveFloat = Field(8.0, description="Largest request body.")
    max_adapter_mib: PositiveFloat = Field(2048.0, description="Largest adapter upload.")
    cors_origin: Annotated[list[str], NoDecode] = Field([], description="Origin that browsers may call from; may be repeated.")
    no_auth: bool = Field(False, description="Serve one open tenant without keys, on loopback only; admin routes still need the admin key.")

    @field_validator("adapter_root", "cors_origin", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """Lists come from a variable separated by commas."""
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @field_validator("store_url")
    @classmethod
    def _known_store(cls, value: str) -> str:
        if value != "embedded" and not value.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("must be `embedded`, redis://..., rediss://... or unix://...")
        return value


class UsageError(ValueError):
    """A setting that can't be. The message is one line for a person and repeats no secret."""


def load_settings(flags: Mapping[str, Any], config: Path | None = None) -> Settings:
    """The settings in force. `flags` holds only those given on the command line. Raises `UsageError`."""
    file_values = _read_toml(config) if config else {}
    _refuse_unknown(file_values, f"{config}")
    variables = [name.removeprefix(ENV_PREFIX) for name in os.environ if name.startswith(ENV_PREFIX)]
    _refuse_unknown((name.lower() for name in variables if name not in OTHER_VARIABLES), "the environment", ENV_PREFIX)

    class Layered(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, file_values)

    try:
        return Layered(**flags)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else "settings"
        raise UsageError(f"{_flag(name)}: {first['msg']}") from None


def check_exposure(settings: Settings) -> None:
    """Raises `StartupFailed` if an open server would be reachable from elsewhere."""
    if settings.no_auth and not is_loopback(settings.host):
        raise StartupFailed(f"--no-auth serves loopback addresses only, not {settings.host}; remove it, or use --host 127.0.0.1")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"the configuration {path} can't be read: {error}") from None
    return {name.replace("-", "_"): value for name, value in values.items()}


def _refuse_unknown(names: Iterable[str], where: str, prefix: str = "") -> None:
    for name in names:
        if name in Settings.model_fields:
            continue
        near = difflib.get_close_matches(name, Settings.model_fields, n=1, cutoff=0.0)[0]
        shown, meant = (f"{prefix}{each.upper()}" if prefix else each for each in (name, near))
        raise UsageError(f"{where} sets {shown}, which is no setting; the nearest is {meant}")
