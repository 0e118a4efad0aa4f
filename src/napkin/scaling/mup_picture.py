"""The picture of a transfer test: loss over learning rate, a line for each width."""

import numpy as np

from napkin.report.xy_picture import Series, xy_svg
from napkin.scaling.mup_transfer import Transfer

_SHADES = ("sky", "blue", "green", "orange", "vermilion", "purple", "grey")


def transfer_svg(curves: dict[int, list[tuple[float, float]]], transfer: Transfer) -> str:
    """Draw the curves, and at each one's lowest loss its best learning rate."""
    series = []
    for number, best in enumerate(transfer.best):
        points = curves[best.width]
        rates, losses = (np.array(column) for column in zip(*points, strict=True))
        shade = _SHADES[number % len(_SHADES)]
        series.append(Series(f"d_model {best.width}", rates, losses, shade, "line"))
        series.append(Series("", np.array([best.rate]), np.array([best.loss]), shade))
    return xy_svg(
        series,
        title="Loss over learning rate, by width",
        x_label="learning rate",
        y_label="loss, nats per token",
        log_y=False,
    )
