"""The error of every element of one matrix as a tidy table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from torch import Tensor

from numdev.arithmetic.formats import Format
from numdev.errors import BadInput

if TYPE_CHECKING:
    import pandas as pd

ROW, COLUMN = "row", "column"


def element_errors(x: Float[Tensor, "rows columns"], reference: Float[Tensor, "rows columns"], fmt: Format) -> pd.DataFrame:
    """One row per element of an output, in the order of its rows and columns.

    Columns: `row`, `column`, `reference` r, `error` D = x - r, `error_u` D / (u max |r|) and `error_ulp`
    D / ulp(r), the last two in the format `fmt`, whose name is `format`. NaN and Inf stay what they are.

    Raises:
        BadInput: if the shapes differ or are empty.
    """
    import pandas as pd  # late: it takes longer to import than numdev, which offers this function

    if x.shape != reference.shape or x.numel() == 0:
        raise BadInput("reference", tuple(reference.shape), f"give the shape of x, {tuple(x.shape)}, not empty")
    x, reference = x.double().cpu(), reference.double().cpu()
    error = x - reference
    row, column = np.indices(tuple(error.shape))
    largest = float(reference.abs().amax()) or 1.0
    columns = {
        "reference": reference,
        "error": error,
        "error_u": error / (fmt.u * largest),
        "error_ulp": error / fmt.ulp(reference),
    }
    table = {ROW: row.ravel(), COLUMN: column.ravel()} | {name: values.flatten().numpy() for name, values in columns.items()}
    return pd.DataFrame(table).assign(format=fmt.name)
