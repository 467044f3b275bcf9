"""`triune buffer stats`: a store in numbers and bars."""

from __future__ import annotations

from collections.abc import Mapping

import typer

from triune.buffer import open as open_buffer_at
from triune.buffer import to_plain
from triune.buffer.statistics import Histogram, Statistics
from triune.cli.buffers import duration, print_json
from triune.cli.screen import table

BAR = 40
"""Characters of the longest bar."""

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def show_stats(run: str, as_json: bool) -> None:
    """Print counts, age, staleness and rewards; as JSON the totals stand at the top level."""
    with open_buffer_at(run) as buffer:
        found = buffer.stats()
    if as_json:
        plain = to_plain(found)
        print_json({**plain.pop("totals"), **plain})
        return
    for line in stats_lines(found):
        typer.echo(line)
    typer.echo("")
    table("totals", ("", ""), [(name, f"{value:g}") for name, value in found.totals.items()])


def stats_lines(found: Statistics) -> list[str]:
    """Depth, age, staleness and rewards, drawn."""
    lines = ["depth"]
    largest = max((depth.num_entries for depth in found.depth), default=0)
    for depth in found.depth:
        name = f"{depth.buffer} {depth.state}"
        lines.append(
            f"  {name:<24}{_bar(depth.num_entries, largest)} {depth.num_entries} ({depth.num_records} records)"
        )
    if found.age_s:
        moments = ", ".join(f"{name} {duration(value)}" for name, value in found.age_s.items())
        lines += ["", f"age of ready entries: {moments}"]
    lines += ["", "staleness of ready entries (published steps)", *_counts(found.staleness)] if found.staleness else []
    for source, histogram in found.rewards.items():
        lines += ["", *_histogram_lines(source, histogram)]
    return lines


def _counts(counts: Mapping[int, int]) -> list[str]:
    largest = max(counts.values(), default=0)
    return [f"  {value:>12}  {_bar(number, largest)} {number}" for value, number in counts.items()]


def _histogram_lines(source: str, histogram: Histogram) -> list[str]:
    number, unknown = sum(histogram.counts), histogram.num_unknown
    mean = "" if histogram.mean is None else f", mean {histogram.mean:.3f}"
    unknown_text = f", {unknown} not known" if unknown else ""
    lines = [f"reward of {source}: {number} entries{mean}{unknown_text}"]
    largest = max(histogram.counts, default=0)
    for low, high, count in zip(histogram.edges, histogram.edges[1:], histogram.counts, strict=False):
        span = f"{low:.3g} … {high:.3g}" if high > low else f"{low:.3g}"
        lines.append(f"  {span:>18}  {_bar(count, largest)} {count}")
    return lines


def _bar(value: float, largest: float) -> str:
    """A bar in eighths of a character; at least one for what is there at all."""
    eighths = round(8 * BAR * value / largest) if largest else 0
    eighths = max(eighths, int(value > 0))
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()
