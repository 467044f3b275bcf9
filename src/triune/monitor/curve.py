"""`curve.png`: the reward over steps, and evaluation accuracy with its confidence interval."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triune.monitor.series import Series


def draw_curve(series: Mapping[str, Series], path: Path, *, title: str) -> Path | None:
    """Draw what a run reached.

    Args:
        series: Metric name → values. `reward`, or else `loss`, makes the line; `eval/<set>/mean@n` with
            its `/low` and `/high` makes points with bars.
        path: PNG file, replaced.
        title: Above the picture.

    Returns:
        The path; None when there is nothing to draw.
    """
    main = next((name for name in ("reward", "loss") if len(series.get(name, ()))), None)
    measures = [
        name for name in sorted(series) if name.startswith("eval/") and "/mean@" in name and f"{name}/low" in series
    ]
    if main is None and not measures:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120)
    FigureCanvasAgg(figure)  # never pyplot: its backend belongs to the user's notebook
    axes: Any = figure.subplots()
    if main is not None:
        steps, values = zip(*series[main], strict=True)
        axes.plot(steps, values, label=main, color="tab:blue", alpha=0.85)
    for number, name in enumerate(measures, start=1):  # colour 0 is the line's
        steps, values = zip(*series[name], strict=True)
        low = [value - bound for (_, bound), value in zip(series[f"{name}/low"], values, strict=False)]
        high = [bound - value for (_, bound), value in zip(series[f"{name}/high"], values, strict=False)]
        bars = [[max(0.0, v) for v in low], [max(0.0, v) for v in high]]
        axes.errorbar(
            steps, values, yerr=bars, fmt="o-", capsize=3, color=f"C{number}", label=f"{name} (95 % interval)"
        )
    axes.set_xlabel("step")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    figure.tight_layout()
    figure.savefig(path)
    return path
