"""A strategy that takes more fresh groups than admission lets in is told so, instead of waiting for ever."""

import asyncio

import pytest

from triune.errors import ConfigError
from triune.ports import Leases
from triune.trainer.allowance import Allowance


class Full:
    """A buffer that has whatever is asked for."""

    def __init__(self, urgent=0) -> None:
        self.urgent = urgent

    async def lease(self, num, **options):
        return Leases([None] * (num + self.urgent))

    async def give_back(self, uses=None, *, dropped_by=""):
        return len(uses)

    async def ack(self, uses, *, checkpoint, step):
        return "acked"


def take(allowance, *numbers, **options):
    return [len(asyncio.run(allowance.lease(num, **options))) for num in numbers]


def test_a_step_may_take_what_its_strategy_declares_and_the_lead_on_top_of_it():
    allowance = Allowance(Full(), "Mine", fresh_ratio=0.75, num=32, lead=2)
    allowance.begin(0)
    assert take(allowance, 24, 24) == [24, 24]
    with pytest.raises(ConfigError, match="asks for 1 fresh groups where at most 0"):
        take(allowance, 1)
    allowance.begin(1)
    assert take(allowance, 24) == [24]
    with pytest.raises(ConfigError, match=r"fresh_ratio. of 0.75 of a step's 32"):
        take(allowance, 24)


def test_other_buffers_uses_again_and_what_was_given_back_do_not_count():
    allowance = Allowance(Full(), "Mine", fresh_ratio=1.0, num=8, lead=1)
    allowance.begin(0)
    assert take(allowance, 50, buffer="expert") == [50]
    assert take(allowance, 50, again=True) == [50]
    assert take(allowance, 8) == [8]
    assert asyncio.run(allowance.give_back([("e", 0)] * 3, dropped_by="flat")) == 3
    assert take(allowance, 3) == [3]
    assert asyncio.run(allowance.ack([], checkpoint="c", step=1)) == "acked", "everything else is the buffer's"


def test_urgent_entries_that_come_on_top_do_not_use_the_lead_up():
    allowance = Allowance(Full(urgent=2), "Mine", fresh_ratio=1.0, num=8, lead=1)
    for step in range(5):
        allowance.begin(step)
        assert take(allowance, 8) == [10]


def test_shares_that_are_no_whole_numbers_never_exceed_their_allowance_wherever_a_resume_begins():
    from triune.algorithms import whole_shares

    for first in range(5):
        for fresh in (0.1, 0.25, 0.33, 0.5, 0.9):
            allowance = Allowance(Full(), "Mine", fresh_ratio=fresh, num=10, lead=1)
            for step in range(first, first + 40):
                allowance.begin(step)
                take(allowance, whole_shares((fresh, 1 - fresh), 10, step)[0])
