"""Everything that a route may need, made once at start and reached through `deps.py`."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.adapters.contents import ContentStore
from loramux.adapters.registry import Registry
from loramux.engine.interface import Engine
from loramux.gateway.adapter_bytes import AdapterBytes
from loramux.gateway.in_flight import InFlight
from loramux.gateway.metrics import Metrics
from loramux.gateway.operations import Operations
from loramux.gateway.placing import Placing
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
    placing: Placing
    engine: Engine
    tokenizer: ChatTokenizer
    metrics: Metrics
    in_flight: InFlight
    """Counts requests to the engine."""
    operations: Operations
    served_model_name: str
    """The base's name in the API: `--served-model-name`, or the checkpoint's own."""
    draining: bool = False
    """Set by SIGTERM: requests in flight finish, new ones are refused."""
