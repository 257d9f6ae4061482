"""The mask and the scale of captured tensors, as `nd.capture` notes them in the metadata of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from numdev.attention.mask import Mask
from numdev.errors import BadInput

FIELD = "problem.source.path"
"""The setting that names the file."""
_UNKEPT = {
    "is_causal": "is_causal, of which torch sees the first keys only; capture it again",
    "attn_mask": "attn_mask, which was not written; capture it again",
}


def notes_of(file: Path) -> dict[str, str]:
    """What a .safetensors file says of its layers, by name; other formats have no place for it."""
    if file.suffix != ".safetensors":
        return {}
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return dict(opened.metadata() or {})


def mask_and_scale(path: str, name: str, text: str, q: Tensor, k: Tensor) -> dict[str, Any]:
    """Mask and scale of a layer from the note that `nd.capture` wrote; nothing of other metadata."""
    try:
        note = json.loads(text)
    except ValueError:
        return {}
    if not isinstance(note, dict) or "mask" not in note:
        return {}
    try:
        scale = None if note.get("scale") is None else float(note["scale"])
        mask = note["mask"]
        if mask in ("", "is_causal") and (not mask or q.shape[-2] == k.shape[-2]):  # as notes were before they held the mask
            return {"mask": Mask(causal=bool(mask)), "scale": scale}
        if isinstance(mask, str):
            return {"scale": scale, "unkept": _UNKEPT.get(mask, mask)}
        lengths = mask["key_lengths"]
        kept = Mask(bool(mask["causal"]), mask["window"], None if lengths is None else tuple(map(int, lengths)))
        return {"mask": kept, "scale": scale}
    except (TypeError, KeyError, ValueError) as error:
        raise BadInput(FIELD, path, f"its note on {name} cannot be read ({error}); capture it again") from None
