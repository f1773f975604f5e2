"""Descriptors that can be read are named at once, however high they are and however many there are."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import FileIO
from time import monotonic

import pytest

from ftsupervise.host.ready import readable


@contextmanager
def pipe_above(number: int) -> Iterator[tuple[int, int]]:
    """A pipe whose ends have descriptors from ``number`` on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < number + 10:
        pytest.skip(f"this account may open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, number + 10), hard))
    try:
        with ExitStack() as ends:
            low, high = os.pipe(), [0, 0]
            for n, fd in enumerate(low):
                ends.callback(os.close, fd)
                os.dup2(fd, number + n)
                high[n] = number + n
                ends.callback(os.close, high[n])
            yield high[0], high[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_descriptor_above_1023_is_waited_for_as_any_other() -> None:
    with pipe_above(1500) as (reader, writer):
        assert readable([reader], 0.0) == []
        os.write(writer, b"x")
        assert readable([reader], None) == [reader]


def test_what_can_be_read_is_returned_as_it_was_given_and_the_end_of_a_pipe_counts() -> None:
    reader, writer = os.pipe()
    other, third = os.pipe()
    with open(reader, "rb", buffering=0) as file:  # noqa: PTH123 - a descriptor
        os.close(writer)
        both: list[FileIO | int] = [file, other]
        assert readable(both, 10.0) == [file]
        assert file.read() == b""
    os.close(other)
    os.close(third)


def test_nothing_to_wait_for_takes_the_time_that_was_given() -> None:
    began = monotonic()
    assert readable([], 0.05) == []
    assert monotonic() - began >= 0.05
