"""An implementation of attention as one that Hugging Face models are told to use: `attn_implementation="<name>"`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from numdev.errors import BadInput, Unsupported
from numdev.training.attend import CallCounts, Exchange, Variant, callers

_OWN = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "paged_attention")
_IGNORED = {  # of transformers' arguments, those that change the result and that its sdpa implementation does not read
    "softcap": "it caps the scores",
    "s_aux": "it adds a learned sink to every row",
    "position_bias": "it adds a bias to the scores",
}


def register(name: str, variant: Variant, *, read_masks: bool = False) -> CallCounts:
    """Models of the library transformers compute attention by `variant` where `attn_implementation` is `name`.

    Both of transformers' registries get the name: that of attention, and that of masks, without which a model builds no mask for
    it and drops padding without a word. The masks are those of transformers' own `sdpa`, so a model that does not run by `sdpa`,
    and would read them as another kind of mask, is refused where it asks for one.

        >>> register("tiled", variant)
        >>> model = AutoModel.from_config(config, attn_implementation="tiled")

    Args:
        name: without a slash, which transformers takes for a place to download from; not one of its own.
        variant: see `attend`.
        read_masks: see `attend`.

    Returns:
        what becomes of the calls of all these models; see `attend`.

    Raises:
        BadInput: for a name that cannot be had, and for what is no implementation of attention.
        Unsupported: where transformers, 4.56 or later, is not installed; in a call, what `attend` does not read, and a model that
            transformers does not run by its `sdpa`.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import sdpa_mask
    except ImportError:
        raise Unsupported("transformers", "4.56 or later is not installed; pip install 'numdev[models]'") from None
    if not name or "/" in name or "|" in name or name in _OWN:
        raise BadInput("name", name, f"give one without / or |, and none of {', '.join(_OWN)}")
    exchange = Exchange(variant, read_masks)

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
    ) -> tuple[Tensor, None]:
        for argument, what in _IGNORED.items():
            if named.get(argument) is not None:
                raise Unsupported(argument, f"{what}, which no implementation here does; use a model without")
        with exchange.active():
            out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **named)
        return out, None

    def masks(*place: Any, **named: Any) -> Tensor | None:
        model: Any = next(callers(PreTrainedModel), None)
        if model is not None and not model._supports_sdpa:
            why = f"transformers does not run {type(model).__name__} by its sdpa implementation, whose masks this one has"
            raise Unsupported("attn_implementation", f"{name!r}: {why}; use a model that has it")
        mask: Tensor | None = sdpa_mask(*place, **named)
        return mask

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, masks)
    return exchange.seen
