"""The block allocator: order, reference counts, and that no sequence of calls loses or doubles a page."""

import re
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.graph_runner.block_allocator import BlockAllocator


def test_hands_out_in_order_and_reuses_the_last_freed() -> None:
    allocator = BlockAllocator(8)
    assert (allocator.num_total, allocator.num_free) == (7, 7)
    assert allocator.allocate(3) == [1, 2, 3]
    assert allocator.allocate(2) == [4, 5]
    allocator.free([1, 2, 3])
    assert allocator.allocate(4) == [1, 2, 3, 6]
    assert allocator.allocate(0) == []


@pytest.mark.parametrize(("operation", "pages", "message"), [
    ("free", [1, 0], "page 0 is the null page"), ("free", [1, 9], "page 9 is unknown: this allocator has the pages 1 to 3"),
    ("free", [1, -1], "page -1 is unknown"), ("free", [1, 3], "double free of page 3: freed 1 times, and it has 0 owners"),
    ("free", [1, 2, 1], "double free of page 1: freed 2 times, and it has 1 owners"),
    ("share", [1, 0], "page 0 is the null page"), ("share", [1, 4], "page 4 is unknown"),
    ("share", [1, 3], "cannot share page 3: it is free"), ("allocate", -1, "cannot allocate -1 pages"),
])
def test_refuses_and_changes_nothing(operation: str, pages: list[int] | int, message: str) -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(2)
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(allocator, operation)(pages)
    assert [allocator.ref_count(page) for page in (1, 2, 3)] == [1, 1, 0]
    assert allocator.num_free == 1
    allocator.free([1, 2])


@pytest.mark.parametrize("num_pages", [1, 0, -3])
def test_needs_a_page_beside_the_null_page(num_pages: int) -> None:
    with pytest.raises(ValueError, match=f"num_pages must be at least 2, got {num_pages}"):
        BlockAllocator(num_pages)


class AllocatorMachine(RuleBasedStateMachine):
    """Compares with the plainest model: a list of owners, each a list of pages."""

    num_pages = 12

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(self.num_pages)
        self.twin = BlockAllocator(self.num_pages)  # gets the same calls and must do the same
        self.owners: list[list[int]] = []

    @rule(n=st.integers(0, 13))
    def allocate(self, n: int) -> None:
        used = {page for owner in self.owners for page in owner}
        pages = self.allocator.allocate(n)
        assert pages == self.twin.allocate(n)
        if n > self.num_pages - 1 - len(used):
            assert pages is None
            return
        assert pages is not None and len(pages) == len(set(pages)) == n
        assert not used & {0, *pages}
        self.owners.append(pages)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.owners))
        prefix = pages[: data.draw(st.integers(0, len(pages)))]
        for allocator in (self.allocator, self.twin):
            allocator.share(prefix)
        self.owners.append(prefix)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pages = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        for allocator in (self.allocator, self.twin):
            allocator.free(pages)

    @rule(page=st.integers(-2, 14))
    def free_what_nobody_owns(self, page: int) -> None:
        if not any(page in owner for owner in self.owners):
            with pytest.raises(ValueError, match="null page|unknown|double free"):
                self.allocator.free([page])

    @invariant()
    def counts_agree(self) -> None:
        owners = Counter(page for owner in self.owners for page in owner)
        for page in range(1, self.num_pages):
            assert self.allocator.ref_count(page) == owners[page]
        assert self.allocator.num_free == self.allocator.num_total - len(owners)


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
