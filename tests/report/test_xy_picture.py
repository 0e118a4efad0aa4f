"""Pictures of points, lines and bands: what is drawn is where the axes say it is."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from napkin import NapkinError
from napkin.report.xy_picture import Series, xy_svg


def test_points_lie_where_the_axes_say() -> None:
    points = Series("runs", np.array([1e18, 1e20, 1e22]), np.array([4.0, 3.0, 2.5]), names=("<a>", "b", "c"))
    picture = xy_svg([points], title="t & u", x_label="FLOPs", y_label="loss")
    root = ElementTree.fromstring(picture)
    circles = [
        (float(each.attrib["cx"]), float(each.attrib["cy"])) for each in root.iter() if each.tag.endswith("circle")
    ]
    assert len(circles) == 3
    # On a logarithmic axis 10^20 is in the middle of 10^18 and 10^22, and where its label is.
    assert circles[1][0] == pytest.approx((circles[0][0] + circles[2][0]) / 2, abs=0.2)
    label = re.search(r'<text x="([\d.]+)"[^>]*>10²⁰<', picture)
    assert label
    assert float(label[1]) == pytest.approx(circles[1][0], abs=0.2)
    assert circles[0][1] < circles[1][1] < circles[2][1]
    assert "&lt;a&gt;" in picture
    assert "t &amp; u" in picture


def test_what_no_axis_can_show_is_left_out() -> None:
    x = np.array([1.0, 2.0, -1.0, np.nan, 3.0])
    drawn = xy_svg([Series("s", x, np.array([1.0, np.inf, 1.0, 1.0, 2.0]))], title="", x_label="", y_label="")
    assert drawn.count("<circle") == 2
    with pytest.raises(NapkinError, match="nothing to draw"):
        xy_svg([Series("s", np.array([-1.0]), np.array([1.0]))], title="", x_label="", y_label="")


def test_one_point_and_equal_values_have_a_picture() -> None:
    one = Series("s", np.array([5.0]), np.array([0.0]))
    band = Series("b", np.array([5.0, 6.0]), np.array([0.0, 0.0]), "green", "band", np.array([0.0, 0.0]))
    assert "<circle" in xy_svg([one, band], title="", x_label="", y_label="", log_y=False)
