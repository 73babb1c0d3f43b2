"""Which models of Transformers take their masks as numbers to add.

A model whose code hands masks on to an attention function may be given a
pattern or booleans. One that adds them to scores itself, as eager attention
does, may not: added booleans hide nothing, and None hides nothing either.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

_AUTO = (
    modeling_auto.MODEL_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

# By the class of a configuration.
_found: dict[type, list[type[PreTrainedModel]]] = {}


# Compiled code asks while it is traced; before PyTorch 2.13 it may pass a
# class, and no configuration.
@torch.compiler.assume_constant_result
def adds_masks(config: type) -> bool:
    """Whether the models of a configuration may add their masks themselves.

    So may those that Transformers runs by eager attention alone, and those
    whose code looks up no attention function. If no model is known, it is
    assumed.
    """
    found = _models(config)
    return not found or any(map(_eager_only, found))


@torch.compiler.assume_constant_result
def calls_cuflash(config: type) -> bool:
    """Whether a model of a configuration may look up attention functions."""
    found = _models(config)
    return not found or any(map(_looks_up, found))


def _eager_only(model: type[PreTrainedModel]) -> bool:
    # Booleans and patterns stand for masks in each of these.
    other = model._supports_flash_attn or model._supports_flex_attn
    hands_on = model._supports_attention_backend and other
    if not (model._supports_sdpa or hands_on):
        return True
    return not _looks_up(model)


def _looks_up(model: type[PreTrainedModel]) -> bool:
    return bool(model._can_set_attn_implementation())


def _models(config: type) -> list[type[PreTrainedModel]]:
    if config not in _found:
        _found[config] = _search(config)
    return _found[config]


def _search(config: type) -> list[type[PreTrainedModel]]:
    """The models that a configuration is made for; they are imported."""
    known = list(_subclasses(PreTrainedModel))
    for base in config.__mro__:
        if base is PreTrainedConfig:
            break
        found = [x for x in known if x.config_class is base]
        if found:  # others may have borrowed it
            own = [x for x in found if _package(x) == _package(base)]
            return own or found
    kind = getattr(config, "model_type", "")
    names = {table.get(kind) for table in _AUTO}  # Llama runs some others
    found = [x for x in known if x.__name__ in names]
    if found:
        return found
    # The encoder's part of a configuration belongs to no model of its own.
    return [x for x in known if _package(x) == _package(config)]


def _package(kind: type) -> str:
    return kind.__module__.rpartition(".")[0]


def _subclasses(
    model: type[PreTrainedModel],
) -> Iterator[type[PreTrainedModel]]:
    for found in model.__subclasses__():
        yield found
        yield from _subclasses(found)
