"""Unit and meaning of every setting of a task and of a rung, by the column in which a configuration states it."""

from __future__ import annotations

from numdev.attention.dictionary import BACKWARD_VARIANT
from numdev.attention.dictionary import VARIANT as FORWARD_VARIANT
from numdev.settings import declared
from numdev.training.data import Folder, Text
from numdev.training.scenes import Scenes
from numdev.training.settings import RungSettings
from numdev.training.tasks import Language, TextToImage

_REFUSED = ("kind", "stated")  # what a study cannot measure has in place of a rung
_Texts = dict[str, tuple[str, str]]  # unit and meaning, by the name of a column


def _of(*kinds: type) -> _Texts:
    return {one.column: (one.unit, one.text) for kind in kinds for one in declared(kind) if one.column}


PROBLEM: _Texts = {
    "type": ("", "class of numdev that states the task"),
    "data.type": ("", "class of numdev that states what it is trained on"),
    "data.digest": ("", "SHA-256 of the files of which it is made"),
    **{f"data.{name}": said for name, said in _of(Folder, Scenes, Text).items()},
    **_of(Language, TextToImage),
}
"""Of the columns `problem.<setting>`."""

VARIANT: _Texts = {
    "type": ("", "class of numdev that states how a run differs"),
    **_of(RungSettings),
    **{f"attention.{name}": said for name, said in (FORWARD_VARIANT | BACKWARD_VARIANT).items() if name not in _REFUSED},
    **{name: FORWARD_VARIANT[name] for name in _REFUSED},
}
"""Of the columns `variant.<setting>`, and of `baseline.<setting>`; those of the attention lie in `attention`."""
