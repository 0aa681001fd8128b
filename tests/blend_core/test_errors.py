"""Texts from elsewhere, before they are shown."""

from __future__ import annotations

from blend_core.errors import one_line, printable


def test_no_control_character_or_change_of_direction_reaches_a_terminal():
    assert printable("a\x1b[31mb\x07c\u202ed\u2066e\x7f\ud800") == "a[31mbcde"
    assert printable("a\r\nb\u2028c\td") == "a  b c d"
    assert printable("Grüße, 世界 ±  x") == "Grüße, 世界 ±  x"


def test_a_long_text_of_several_lines_becomes_one_short_line():
    assert one_line(" a\n\n\x1bb\tc ") == "a b c"
    assert one_line("x" * 30, 10) == "x" * 10 + "..."
