"""The compute lane between a loop and its thread."""

from __future__ import annotations

import asyncio

import pytest

from triune.launcher.lane import ThreadLane


def test_work_that_raises_stop_iteration_is_heard_and_the_lane_goes_on():
    lane = ThreadLane()

    async def body():
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            await asyncio.wait_for(lane.run(next, iter(())), 5)
        return await asyncio.wait_for(lane.run(len, "abc"), 5)

    assert asyncio.run(body()) == 3
    lane.close()
