"""Which requests an engine takes, and for how long: names, the bound of the queue, timeouts."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Mapping, Sequence

from quire.graph_runner.request import Request, RequestOptions


class QueueFull(RuntimeError):
    """A request was refused because ``max_waiting`` requests wait already."""


class Admission:
    """The names and deadlines of unfinished requests. ``max_waiting``: requests that may wait for a slot, or None; ``slots``:
    those that may run."""

    def __init__(self, max_waiting: int | None, slots: int) -> None:
        self.max_waiting, self.slots = max_waiting, slots
        self._named: dict[str, list[int]] = {}
        self._deadlines: list[tuple[float, int, float]] = []  # a heap of (time, request, seconds)

    def check(self, options: RequestOptions, count: int, waiting: int) -> None:
        """Check that ``count`` requests may be added while ``waiting`` wait for a slot (negative: that many slots are free).
        Raises ValueError if another request has the name, QueueFull if too many would wait."""
        name, most = options.request_id, self.max_waiting
        if name in self._named:
            raise ValueError(f"a request with request_id {name!r} is unfinished; give another one, or abort that one first")
        if most is not None and waiting + count > most:
            if count > self.slots + most:  # it would not help to wait
                raise QueueFull(f"a prompt with n={count} has never room in the queue: max_num_seqs={self.slots} may run, and "
                                f"max_waiting={most}. Lower n, or raise one of these")
            raise QueueFull(f"the queue is full: {max(0, waiting)} requests wait for a slot, and max_waiting={most}. Try again "
                            "when some have ended, or raise max_waiting or max_num_seqs")

    def added(self, requests: Sequence[Request], options: RequestOptions) -> None:
        """The requests are queued."""
        ids = [request.request_id for request in requests]
        if options.request_id is not None:
            self._named[options.request_id] = ids
        if options.timeout is not None:
            for number in ids:
                heapq.heappush(self._deadlines, (time.monotonic() + options.timeout, number, options.timeout))

    def ended(self, request: Request) -> None:
        """The request is finished; its name is free when all with it are."""
        name = request.output.request_id
        if request.request_id in (ids := self._named.get(name, [])):
            ids.remove(request.request_id)
            if not ids:
                del self._named[name]

    def ids_of(self, request_id: int | str, requests: Mapping[int, Request]) -> list[int]:
        """The numbers of the unfinished requests with a name, or the number itself. A request without a name has its number
        as one."""
        if isinstance(request_id, int):
            return [request_id]
        named = self._named.get(request_id)
        return list(named) if named else [n for n, request in requests.items() if request.output.request_id == request_id]

    def late(self) -> Iterator[tuple[int, float]]:
        """Requests, finished ones too, whose time is over, and the seconds that they had; each once."""
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            _, number, seconds = heapq.heappop(self._deadlines)
            yield number, seconds
