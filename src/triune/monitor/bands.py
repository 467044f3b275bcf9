"""Mean curves of several variants with their confidence bands, in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec


class Band(msgspec.Struct, frozen=True, kw_only=True):
    """One variant's curve.

    Attributes:
        name: In the legend.
        steps: Where it is known, ascending.
        mean: Over the seeds, one for each step.
        low: Lower end of the interval, None where there is none (one seed).
        high: Upper end, likewise.
    """

    name: str
    steps: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float | None]
    high: Sequence[float | None]


def draw_bands(bands: Sequence[Band], path: Path, *, title: str, metric: str) -> Path | None:
    """Draw every band in a colour of its own.

    Args:
        bands: In the order of the legend.
        path: PNG file, replaced.
        title: Above the picture.
        metric: Name of the vertical axis.

    Returns:
        The path; None when no band has a point.
    """
    drawn = [band for band in bands if len(band.steps)]
    if not drawn:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120)
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    for number, band in enumerate(drawn):
        points = "o-" if len(band.steps) <= 30 else "-"
        axes.plot(band.steps, band.mean, points, markersize=3, color=f"C{number % 10}", label=band.name)
        known = [place for place, low in enumerate(band.low) if low is not None]
        if known:
            steps = [band.steps[place] for place in known]
            low, high = [band.low[place] for place in known], [band.high[place] for place in known]
            axes.fill_between(steps, low, high, color=f"C{number % 10}", alpha=0.2, linewidth=0)
    axes.set_xlabel("step")
    axes.set_ylabel(metric)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    figure.tight_layout()
    figure.savefig(path)
    return path
