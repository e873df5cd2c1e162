"""Pages of the KV cache that several requests read: equal beginnings are computed once.

Keys and values of a token depend on the tokens up to it, on the weights, on the request's adapters (``Request.root``) and on
whether the sequence is longer than the scheduler's ``length_limits``, and on nothing else: the model was proved to treat
each token by itself outside causal attention, windows and chunks are counted from the sequence's own positions, and pages hold
every token whatever the window. So a full page is known by the hash of its tokens chained to the hash of the page before
(SHA-256), and a request whose tokens begin with the same pages reads these instead of computing its own. Never all of them: the
last token is computed, for its logits. Beyond the last full page, the tokens that a running request or a page has in common are
copied into a page of the request's own (``Match.copy_from``).

NOTE [No older than the request]: by default a request reads only what was computed after it arrived, from requests that run
beside it. So it reads nothing that it could not have computed itself with the weights it met, however they are written
(``p.data``, a kernel of another library), and the cache is empty whenever no request is left. ``lasting`` keeps pages until
their memory is needed or the weights change, as far as ``weights_version`` notices.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from quire.graph_runner.adapter_places import AdapterPlaces
from quire.graph_runner.block_allocator import BlockAllocator, KeptPages
from quire.graph_runner.copies import uncounted_writes
from quire.graph_runner.model_parts import Apart
from quire.graph_runner.request import Request
from quire.graph_runner.window_pages import WindowPages
from quire.passes.tensor_version import version_of
from quire.passes.verify.quantized import parts

_PLAIN = (torch.nn.Parameter, torch.Tensor)  # their data are not in other tensors
_NOT_FOUND = itertools.count()


class Match(NamedTuple):
    """The part of a request that is in the cache: ``pages``, then ``copied`` tokens of the page ``copy_from``, which were
    computed from step ``copied_since`` on. ``coming``: a running request is about to compute the next page. ``window_from``: as
    ``copy_from``, of layers with a window that have pages of their own."""

    pages: list[int]
    copy_from: int = -1
    copied: int = 0
    copied_since: int = 0
    coming: bool = False
    window_from: int = -1


@dataclass
class PrefixStats:
    """Counts so far: admitted requests, those that reused something, tokens looked up and tokens not computed."""

    requests: int = 0
    hits: int = 0
    tokens: int = 0
    saved_tokens: int = 0


class PrefixCache(KeptPages):
    """Which pages hold which tokens. Follows the weights of ``model``, and the tensors that ``others`` gives: what it reads
    beside its parameters and buffers. ``places``: of the trace, if adapters are in places and not read from the model.
    ``lasting``: keep pages of finished requests for later ones, see NOTE [No older than the request]. ``windows``: pages of
    layers with a window, beside the others'; None: all layers have the same."""

    def __init__(self, allocator: BlockAllocator, page_size: int, model: torch.nn.Module | None = None, *,
                 lasting: bool = False) -> None:
        super().__init__(allocator)
        self.page_size, self.model, self.lasting = page_size, model, lasting
        self.windows: WindowPages | None = None
        self.others: Callable[[], Iterable[torch.Tensor | None]] = tuple
        self.places: AdapterPlaces | None = None
        self._weights, self._storages = weights_version(model), storages(model)
        self.stats, self.epoch = PrefixStats(), 0  # the epoch: how often it was cleared
        self._since: dict[int, int] = {}  # page -> the first step that computed something in it or before it
        self._coming: dict[bytes, Request] = {}  # keys of the pages that running requests compute next
        self._tails: dict[bytes, Request] = {}  # key before the last page of a prompt -> request that has computed it

    def follow_weights(self) -> None:
        """Forget all pages if the weights have changed."""
        number, apart = (0, None) if self.places is None else (self.places.version, self.places.apart)
        if (now := weights_version(self.model, self.others(), number, apart)) != self._weights:
            self._weights, self._storages = now, storages(self.model, self.others())
            self.clear()

    def _key(self, request: Request, page: int) -> bytes:
        """Key of a page of the request's tokens, which the host must know. Worked out when it is asked for: those of a prompt
        that is not in the cache while the device computes, not before."""
        keys, size = request.page_keys, self.page_size
        for i in range(len(keys), page + 1):
            tokens = array("q", request.token_ids[i * size : (i + 1) * size]).tobytes()
            keys.append(hashlib.sha256((keys[-1] if keys else _root(request)) + tokens).digest())
        return keys[page]

    def _fresh(self, since: int, request: Request) -> bool:
        return self.lasting or since > request.arrived_at

    def match(self, request: Request) -> Match:
        """The prefix that a waiting request need not compute."""
        found = self._match(request)
        if self.windows is None or (usable := self.windows.usable(request.page_keys[: len(found.pages)])) == len(found.pages):
            return found
        return Match(found.pages[:usable], coming=found.coming)

    def _match(self, request: Request) -> Match:
        """The same, whether or not layers with a window have their pages too."""
        size, ids = self.page_size, request.token_ids
        most = len(ids) - 1
        if request.num_scored < len(request.prompt_token_ids):  # logits are needed from the token before
            most = min(most, request.num_scored - 1)
        pages: list[int] = []
        for i in range(most // size):
            key = self._key(request, i)
            page = self._page_of.get(key)
            if page is None or not self._fresh(self._since[page], request):
                return Match(pages, coming=key in self._coming)
            pages.append(page)
        begin, left = len(pages) * size, most - len(pages) * size
        if left <= 0:
            return Match(pages)
        if len(ids) // size > len(pages):  # the request's next page is full, and all but its last tokens may be read
            key = self._key(request, len(pages))
            page = self._page_of.get(key)
            window = -1 if self.windows is None else self.windows.page_of(key)
            if page is not None and window is not None and self._fresh(self._since[page], request):
                return Match(pages, page, left, self._since[page], window_from=window)
            if key in self._coming:
                return Match(pages, coming=True)
        other = self._tails.get(self._key(request, len(pages) - 1) if pages else _root(request))
        if (other is not None and max(other.num_behind, other.window_behind) <= len(pages) < len(other.pages)
                and self._fresh(other.computed_since, request)):
            known = other.token_ids[begin : min(begin + left, other.num_computed, len(other.prompt_token_ids))]
            same = next((i for i, t in enumerate(known) if t != ids[begin + i]), len(known))
            if same:
                window = -1 if self.windows is None else other.window_pages[len(pages)]
                return Match(pages, other.pages[len(pages)], same, other.computed_since, window_from=window)
        return Match(pages)

    def admit(self, request: Request, match: Match, step: int) -> None:
        """The request reads the pages of its match, and will compute the pages of its prompt that follow, from ``step`` on."""
        source = [match.copied_since] if match.copied else []
        held = request.pages[request.num_behind : len(match.pages)]  # a page's step is the first of those before it, too
        request.computed_since = min([step, *(self._since[page] for page in held), *source])
        stats, saved = self.stats, len(match.pages) * self.page_size + match.copied
        stats.requests += 1
        stats.hits += saved > 0
        stats.tokens += len(request.token_ids)
        stats.saved_tokens += saved
        request.num_keyed, request.epoch = len(match.pages), self.epoch
        request.num_coming = len(request.token_ids) // self.page_size
        self._expect(request)

    def _expect(self, request: Request) -> None:
        """Note the key of the page that the request computes next, if it is full: requests that begin with it wait."""
        if request.num_keyed < request.num_coming:
            self._coming.setdefault(self._key(request, request.num_keyed), request)

    def computed(self, request: Request) -> None:
        """The request's tokens up to ``num_computed`` are in the cache, or will be before any later work: the step that
        computes them was launched. Those of a request from before ``clear`` stay its own."""
        if request.epoch != self.epoch:
            return
        count = min(request.num_computed, len(request.token_ids)) // self.page_size
        for i in range(request.num_keyed, count):
            key = self._key(request, i)
            self._coming.pop(key, None)
            page = request.pages[i]
            old = self._page_of.get(key)
            if old is not None and not self.lasting:  # too old for the request, and for all that come
                self._forget(old)
            if key not in self._page_of and page not in self._key_of and i >= request.num_behind:
                self._remember(key, page)
                self._since[page] = request.computed_since
            if self.windows is not None and key in self._page_of:
                self.windows.keep(key, request, i)
        request.num_keyed = max(request.num_keyed, count)
        self._expect(request)
        full = len(request.prompt_token_ids) // self.page_size
        if request.num_computed >= len(request.prompt_token_ids) and len(request.prompt_token_ids) % self.page_size:
            self._tails[self._key(request, full - 1) if full else _root(request)] = request

    def left(self, request: Request) -> None:
        """The request gives up its pages."""
        for key in request.page_keys[request.num_keyed :]:
            if self._coming.get(key) is request:
                del self._coming[key]
        full = len(request.prompt_token_ids) // self.page_size
        key = request.page_keys[full - 1] if 0 < full <= len(request.page_keys) else _root(request)
        if self._tails.get(key) is request:
            del self._tails[key]
        self.release(request.pages[request.num_behind :])

    def clear(self) -> None:
        """Forget all pages. Requests keep theirs, to themselves."""
        self.epoch += 1
        if self.windows is not None:
            for key in self._page_of:
                self.windows.forget(key)
        self.allocator.free(list(self._key_of)[::-1])
        for known in (self._key_of, self._page_of, self._since, self._idle):
            known.clear()
        self._tails.clear()
        self._coming.clear()

    def _forget(self, page: int) -> None:
        if self.windows is not None:
            self.windows.forget(self._key_of[page])
        del self._since[page]
        super()._forget(page)


def _root(request: Request) -> bytes:
    """Root of the key of a first page: requests of different kinds share nothing."""
    return request.root + (b"\0\0%d" % request.length_kind if request.length_kind else b"")


def weights_version(model: torch.nn.Module | None, others: Iterable[torch.Tensor | None] = (), number: int = 0,
                    apart: Apart | None = None) -> int:
    """A number that changes when a parameter, a buffer or one of ``others`` is updated in place by PyTorch, or replaced, and
    when ``number`` or ``uncounted_writes`` changes. Parameters in parts of the model that are ``apart`` do not count. Another
    one each time while one of ``others`` is None: what is not found cannot be followed.

    Not noticed: what PyTorch does not count (writes through ``p.data``, to inference tensors, and by kernels that only have an
    address).
    """
    if model is None:
        return 0
    found, modules, seen = [uncounted_writes(), number], [model], {model}
    for other in others:
        found += (next(_NOT_FOUND),) if other is None else _versions(other)
    while modules:  # several times as fast as ``model.parameters()``; waiting requests pay for it in every step
        module = modules.pop()
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is not None:
                    found += _versions(tensor)
        counted = None if apart is None else apart.get(id(module))
        for name, child in module._modules.items():
            if counted is not None and name not in counted:
                continue
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)
    return hash(tuple(found))


def _versions(tensor: torch.Tensor) -> Iterator[int]:
    for part in (tensor,) if type(tensor) in _PLAIN else parts(tensor):
        yield part.data_ptr()
        yield part.untyped_storage()._cdata
        yield version_of(part)


def storages(model: torch.nn.Module | None, others: Iterable[torch.Tensor | None] = ()) -> list[StorageWeakRef]:
    """What ``weights_version`` looks at, without its memory: while this is held, no other storage has the address of one of
    these. A second new tensor may well have the memory that the first one had, and no more changes in place."""
    own = () if model is None else (*model.parameters(), *model.buffers())
    return [StorageWeakRef(part.untyped_storage()) for t in (*own, *others) if t is not None for part in parts(t)]
