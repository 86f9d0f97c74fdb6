"""KV events in the engine's step."""

from radix.events import EventLog
from runtime.engine.core import EngineCore
from runtime.engine.part import Part
from runtime.features.kv_events.publisher import EventPublisher


class KVEvents(Part):
    """Publishes events of KV that enters or leaves the cache and its tiers."""

    def __init__(self, core: EngineCore, events: EventLog):
        self.publisher = EventPublisher(core.config.cache)
        self._parts, self._events = core.parts, events

    def settle(self) -> None:
        self.publisher.publish(self._events.take())
        for kv_events in self._parts.kv_events:
            for tier, events in kv_events().items():
                self.publisher.publish(events, tier)

    def erase(self, tenant: str) -> None:
        self.publisher.erase(tenant)

    def close(self) -> None:
        self.publisher.close()
