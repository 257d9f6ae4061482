"""Several values under one name in Gluon code."""

from triton.experimental import gluon
from triton.language.core import _aggregate


@gluon.constexpr_function
def _take(self, *values):
    for name, value in zip(self.names, values, strict=True):
        setattr(self, name, value)


def aggregate(cls):
    """Make a class whose annotations are fields. Its constructor takes their values in order, unless it defines its own."""
    if "__init__" not in vars(cls):
        cls.__init__ = _take
    made = _aggregate(cls)
    made.names = tuple(cls.__annotations__)
    return made
