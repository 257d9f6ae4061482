"""A setting is a field: what is declared, and the object that values make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, InitVar, dataclass
from enum import Enum
from typing import Any

import pytest

from numdev.errors import BadInput, NotHonoured
from numdev.settings import changes, declared, held, inline, make, node_of, setting


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Length:
    """Has a notation of its own."""

    metres: float

    @staticmethod
    def parse(text: str) -> Length:
        if not text.endswith("m"):
            raise BadInput("length", text, "give metres, as in 3m")
        return Length(float(text[:-1]))


@dataclass(frozen=True)
class Size:
    width: int = setting(None, "from left to right", "rows")
    height: int = setting(2, "from top to bottom", follows=".width")
    _: KW_ONLY
    side: InitVar[int | None] = setting(None, "both", column="")

    def __post_init__(self, side: int | None) -> None:
        if self.width is None:
            object.__setattr__(self, "width", side or 1)
        if self.width > 9:
            raise BadInput("box.width", self.width, "give at most 9, or box.side")


@dataclass(frozen=True)
class Paint:
    colour: Colour = setting(Colour.RED, "its colour")
    coats: int | None = setting(1, "how often", none="never")


@dataclass(frozen=True)
class Box:
    content: Any = held(None, "other")
    size: Size = inline(Size)
    reach: Length | None = setting(None, "how far it reaches")
    weights: tuple[float, ...] = setting((), "of its corners")
    paint: InitVar[Mapping[str, Any] | None] = changes(Paint)

    def __post_init__(self, paint: Mapping[str, Any] | None) -> None:
        if paint and paint.get("coats") == 13:
            raise NotHonoured("box.paint.coats", 13, "no")
        object.__setattr__(self, "painted", dict(paint or {}))


def test_what_is_declared() -> None:
    known = {one.name: (one.default, one.column, one.unit) for one in declared(Box)}
    assert known == {
        "width": (None, "size.width", "rows"),
        "height": ("${.width}", "size.height", ""),
        "side": (None, "", ""),
        "reach": (None, "reach", ""),
        "weights": ((), "weights", ""),
        "paint.colour": (None, "paint.colour", ""),
        "paint.coats": (None, "paint.coats", ""),
    }
    assert node_of(Box) == {"content": "${other}"}


def test_an_object_of_values() -> None:
    values = {"content": 1, "width": 3, "height": 4, "side": None, "reach": "2.5m", "weights": [1, 0.5]}
    box = make(Box, values | {"paint": {"colour": "blue", "coats": "never"}}, "box")
    assert box == Box(1, Size(3, 4), Length(2.5), (1.0, 0.5))
    assert vars(box)["painted"] == {"colour": Colour.BLUE, "coats": None}
    assert make(Box, {"side": 5, "paint": {"colour": None, "coats": None}}, "box").size == Size(5, 2)
    assert make(Box, {"size": Size(7), "reach": Length(1.0)}, "box") == Box(size=Size(7), reach=Length(1.0))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"reach": "3ft"}, r"^crate\.reach: '3ft' cannot be used; give metres, as in 3m: how far it reaches"),
        ({"paint": {"colour": "green"}}, r"^crate\.paint\.colour: 'green' cannot be used; use one of red, blue: its colour"),
        ({"width": 2.5}, r"^crate\.width: 2\.5 cannot be used; give a whole number: from left to right"),
        ({"width": 10}, r"^crate\.width: 10 cannot be used; give at most 9, or crate\.side"),
        ({"depth": 1}, r"^crate\.depth: 1 cannot be used; Box takes no such argument"),
        ({"weights": ["a"]}, r"^crate\.weights: "),
    ],
)
def test_an_error_names_the_setting_as_the_node_has_it(values: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        make(Box, values, "crate")


def test_a_refusal_stays_one() -> None:
    with pytest.raises(NotHonoured):
        make(Box, {"paint": {"coats": 13}}, "crate")


def test_a_function_is_made_of_its_annotations() -> None:
    def both(colour: Colour, **others: int) -> tuple[Colour, dict[str, int]]:
        return colour, others

    assert make(both, {"colour": "blue", "more": 3}, "here") == (Colour.BLUE, {"more": 3})
