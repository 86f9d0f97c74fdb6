"""The engine's low-rank adapters by digest. The namespaces of their requests contain the digest."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from runtime.calls import Answers, LoadAdapter, LoadedAdapter, State, UnloadAdapter
from runtime.engine.part import Part
from runtime.errors import InvalidRequest, ModelError
from runtime.execution.device import is_out_of_memory
from runtime.execution.executor import Executor
from runtime.protocol import Finish
from runtime.request import Request


class EngineAdapters(Part):
    """Loads and unloads adapters. An unloaded adapter stays until no request uses it.

    Args:
        executor: computes with the adapters.
        live: the live requests by id.

    Attributes:
        requests: number of requests so far, by the adapter's digest.
    """

    def __init__(self, executor: Executor, live: Mapping[str, Request]):
        self._executor, self._live = executor, live
        self._leaving: set[str] = set()
        self.requests: Counter[str] = Counter()

    def answers(self) -> Answers:
        return LoadAdapter.by(self.load), UnloadAdapter.by(self.unload)

    def report(self, state: State) -> None:
        state.labelled["requests_by_adapter"] = dict(self.requests)

    def load(self, call: LoadAdapter) -> LoadedAdapter:
        """Load an adapter. Raises InvalidRequest if it cannot be served."""
        from runtime.models.adapters.lora import read_lora

        try:
            adapter = read_lora(Path(call.path))
            self._executor.load_adapter(adapter)
        except ModelError as error:
            raise InvalidRequest(error.message, param="lora_path") from None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise InvalidRequest(f"{call.path} does not fit into memory", param="lora_path") from None
        self._leaving.discard(adapter.digest)
        self.requests.setdefault(adapter.digest, 0)
        return LoadedAdapter(adapter.digest, adapter.rank)

    def unload(self, call: UnloadAdapter) -> int:
        """Unload an adapter once its requests have ended."""
        running = self._running(call.digest)
        self._leaving.add(call.digest)
        self._drop_unused()
        return running

    def added(self, request: Request) -> None:
        """Count a request. Raises InvalidRequest if its adapter was unloaded since it was accepted."""
        if digest := request.namespace.adapter:
            if digest not in self.requests:
                raise InvalidRequest("the adapter was unloaded", param="model", code="model_not_found")
            self.requests[digest] += not request.message.idle

    def ended(self, request: Request, finish: Finish) -> None:
        if self._leaving:
            self._drop_unused()

    def _running(self, digest: str) -> int:
        return sum(request.namespace.adapter == digest for request in self._live.values())

    def _drop_unused(self) -> None:
        for digest in [digest for digest in self._leaving if not self._running(digest)]:
            self._executor.drop_adapter(digest)
            self._leaving.remove(digest)
            del self.requests[digest]
