"""The picture of several variants."""

from triune.monitor.bands import Band, draw_bands

CURVE = Band(name="a", steps=[0, 10, 20], mean=[0.1, 0.2, 0.4], low=[0.0, 0.1, None], high=[0.2, 0.3, None])
LINE = Band(name="b", steps=[0, 20], mean=[0.1, 0.1], low=[None, None], high=[None, None])


def test_curves_with_and_without_bands_are_drawn_into_one_picture(tmp_path):
    path = draw_bands([CURVE, LINE], tmp_path / "x.png", title="a / b", metric="reward")
    assert path is not None
    both = path.read_bytes()
    assert both.startswith(b"\x89PNG")
    draw_bands([LINE], path, title="a / b", metric="reward")
    assert path.read_bytes() != both


def test_nothing_is_drawn_of_nothing(tmp_path):
    empty = Band(name="c", steps=[], mean=[], low=[], high=[])
    assert draw_bands([empty], tmp_path / "x.png", title="", metric="reward") is None
    assert not (tmp_path / "x.png").exists()
