"""Charts as PNG, by matplotlib where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from logitless.lab.bench.charts import DASHES, LIGHT, Bars, Chart, axis_label, number, shade


def to_png(chart: Chart, path: Path) -> bool:
    """The chart as PNG; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    wide = 7.6
    if isinstance(chart, Bars):
        figure, axes = plt.subplots(figsize=(wide, 0.8 + 0.4 * len(chart.bars)), dpi=150)
        labels = [b.label for b in chart.bars]
        for i, bar in enumerate(chart.bars):
            start = 0.0
            for k, (_, value) in enumerate(bar.parts):
                axes.barh(i, value, left=start, color=LIGHT[bar.tone], alpha=shade(k, len(bar.parts)))
                start += value
            axes.text(start, i, f"  {bar.missing or number(bar.total)}", va="center", fontsize=8)
        axes.set_yticks(range(len(labels)), labels, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(chart.unit)
        if chart.floor is not None:
            axes.axvline(chart.floor, color=LIGHT["floor"], linestyle="--", linewidth=1, label=chart.floor_label)
            axes.legend(fontsize=8)
    else:
        figure, axes = plt.subplots(figsize=(wide, 3.4), dpi=150)
        for s in sorted(chart.series, key=lambda s: s.tone != "ours"):
            dash: Any = (0, [float(x) for x in DASHES[s.tone].split()]) if DASHES[s.tone] else "-"
            few: dict[str, Any] = dict(marker="o", markersize=3) if len(s.points) <= 24 else {}
            axes.plot(*zip(*s.points, strict=True), color=LIGHT[s.tone], label=s.label, linestyle=dash, **few)
        if chart.log:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=min([0.0, *(y for s in chart.series for _, y in s.points)]))
        axes.set_xlabel(axis_label(chart, chart.x_label))
        axes.set_ylabel(axis_label(chart, chart.y_label))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    axes.set_title(chart.title, fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return True
