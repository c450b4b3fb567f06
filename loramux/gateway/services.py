"""Everything that a route may need, made once at start and reached through `deps.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

from loramux.adapters.contents import ContentStore
from loramux.adapters.registry import Registry
from loramux.engine.interface import Engine
from loramux.gateway.adapter_bytes import AdapterBytes
from loramux.gateway.in_flight import InFlight
from loramux.gateway.metrics import Metrics
from loramux.gateway.settings import Settings
from loramux.gateway.store.client import Store
from loramux.gateway.tenancy.store import TenantStore
from loramux.gateway.tokenizer import ChatTokenizer


@dataclass
class Services:
    """The gateway's parts. Only `draining` changes after start."""

    settings: Settings
    store: Store
    tenants: TenantStore
    registry: Registry
    contents: ContentStore
    adapter_bytes: AdapterBytes
    engine: Engine
    tokenizer: ChatTokenizer
    metrics: Metrics
    served_model_name: str
    """The base's name in the API: `--served-model-name`, or the checkpoint's own."""
    draining: bool = False
    """Set by SIGTERM: requests in flight finish, new ones are refused."""
    in_flight: InFlight = field(init=False)
    """Counts requests to the engine."""

    def __post_init__(self) -> None:
        self.in_flight = InFlight(self.metrics)
