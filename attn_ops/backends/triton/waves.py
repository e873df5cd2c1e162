"""How long programs of equal work take that do not all fit on the GPU at once.

``places`` programs run at a time, in waves. A program of a last wave that is not full has the memory to itself, but alone it
waits for its own loads: a last wave with one program took 0.4 of the time of a full one on an H200, and the more of it is full,
the longer (benchmarks/results/h200_decode_waves.json: 17 to 192 sequences, heads of 64, 128 and 256). So 512 programs on 396
places took 79 us where 384 took 54. Where there is a choice, of how many programs fit or how far keys are cut, it goes by that.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Keys that a program has time for before its first ones have come, and after its last.
START = tl.constexpr(160)


@triton.jit
def waves(programs, places):
    """Time of ``programs``, in full waves."""
    rest = programs % places
    return programs // places + (rest > 0) * (0.4 + 0.5 * (rest / places))


def time_of(programs: int, places: int, keys: float) -> float:
    """The same, of programs with so many keys each, on the host. For any ``places``, in the time of a key at the bandwidth."""
    return waves.fn(programs, places) * places * (keys + START.value)
