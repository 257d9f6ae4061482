"""An implementation of attention as one that Hugging Face models are told to use: `attn_implementation="<name>"`."""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from numdev.errors import BadInput, Unsupported
from numdev.training.attend import Variant, exchanging
from numdev.training.interception import CallCounts, callers

_IGNORED = {  # of transformers' arguments, those that change the result and that its sdpa implementation does not read
    "softcap": "it caps the scores",
    "s_aux": "it adds a learned sink to every row",
    "position_bias": "it adds a bias to the scores",
}


def register(name: str, variant: Variant, *, read_masks: bool = False) -> CallCounts:
    """Models of the library transformers compute attention by `variant` where `attn_implementation` is `name`.

    Both of transformers' registries get the name: that of attention, and that of masks, without which a model builds no mask for
    it and drops padding without a word. The masks are those of transformers' own `sdpa`, so a model that does not run by `sdpa`,
    and would read them as another kind of mask, is refused where it asks for one. A model that asks for a causal mask is probed
    once: with another last token, what it makes of the tokens before must not change.

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
        Unsupported: where transformers, 4.56 or later, is not installed; in a call, what `attend` does not read, a model that
            transformers does not run by its `sdpa`, and one whose probe changes.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import sdpa_mask
    except ImportError:
        raise Unsupported("transformers", "4.56 or later is not installed; pip install 'numdev[models]'") from None
    if not name or "/" in name or "|" in name or name in _OWN:
        raise BadInput("name", name, f"give one without / or |, and none of {', '.join(_OWN)}")
    seen = CallCounts()
    exchanged = exchanging(variant, seen, read_masks)

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
    ) -> tuple[Tensor, None]:
        for argument, what in _IGNORED.items():
            if named.get(argument) is not None:
                raise Unsupported(argument, f"{what}, which no implementation here does; use a model without")
        with exchanged:
            out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **named)
        return out, None

    checked: WeakSet[nn.Module] = WeakSet()

    def masks(*place: Any, **named: Any) -> Tensor | None:
        model: Any = next((each for each in callers() if isinstance(each, PreTrainedModel)), None)
        if model is not None and model not in checked:
            if not model._supports_sdpa:
                why = f"transformers does not run {type(model).__name__} by its sdpa implementation, whose masks this one has"
                raise Unsupported("attn_implementation", f"{name!r}: {why}; use a model that has it")
            if _is_causal(**named):
                checked.add(model)  # beforehand: the probe asks for masks too
                calls = seen.calls
                try:
                    _probe(model, name)
                except Unsupported:
                    checked.discard(model)
                    raise
                finally:
                    seen.calls = calls
        mask: Tensor | None = sdpa_mask(*place, **named)
        return mask

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, masks)
    return seen


def _is_causal(mask_function: Any = None, kv_length: int = 0, **_: Any) -> bool:
    """Whether the first of several tokens must not see the second; `mask_function` takes batch entry, head, query and key."""
    return mask_function is not None and kv_length > 1 and not bool(mask_function(*map(torch.tensor, (0, 0, 0, 1))))


def _probe(model: Any, name: str) -> None:
    """Raise Unsupported where the last of four tokens changes what a causal model makes of those before it.

    A row of a product does not depend on the other rows, and a P behind a causal limit is exactly 0. So nothing changes, but
    where a model groups rows by their content (a mixture of experts): by another order of sums, a few u of the format.
    """
    modes = {module: module.training for module in model.modules()}
    tokens = torch.arange(4, device=model.device)[None]
    try:
        with torch.no_grad():
            one, other = (model.eval()(input_ids=ids)[0][:, :-1].double() for ids in (tokens, tokens + (tokens == 3)))
    except Unsupported:
        raise
    except Exception as error:  # whatever a model wants beside tokens, it says in its own way
        why = f"register: {type(model).__name__} was not probed for causality, since tokens alone do not run it ({error})"
        warnings.warn(f"{why}; compare it once with attn_implementation='sdpa'", stacklevel=3)
        return
    finally:
        for module, mode in modes.items():
            module.training = mode
    if bool((one - other).abs().max() > 16 * torch.finfo(model.dtype).eps * one.abs().max()):
        why = f"{type(model).__name__} asks for a causal mask, and a later token changes what it makes of earlier ones"
        raise Unsupported("attn_implementation", f"{name!r}: {why}; choose another model, or its own attention")


_OWN = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "paged_attention")
