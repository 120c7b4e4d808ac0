"""AttentionConfig and the decision table: which path a forward mode takes, and why."""

import dataclasses
import difflib
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxattn.checks import STORED_DTYPES

MODES = ("extend", "decode", "target_verify", "draft_decode", "draft_extend")
_PREFIX = "JAXATTN_"
_TRUE, _FALSE = ("1", "true", "on", "yes"), ("0", "false", "off", "no")


class Route(NamedTuple):
    """Where a forward mode goes: `"unified"`, `"dense"` (dense masks in XLA) or `"unsupported"`, and why."""

    path: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """The switches of a deployment.

    Attributes:
        unified: use the unified kernels at all; a window pool needs them and turns them on.
        unified_verify: use them for target_verify.
        unified_draft_extend: use them for draft_extend.
        mla: the model has multi-head latent attention.
        topk: draft branches of a sequence.
        page_size: tokens in a page of the cache.
        window_pool: sliding-window layers have a pool of their own.
        kv_dtype: what the cache stores.

    Raises:
        ValueError: a number is below 1, or `kv_dtype` is no format that a cache can hold.
        TypeError: a switch is not a bool, or a number not an int.

    Example:
        >>> from jaxattn.routing import AttentionConfig, route
        >>> route("target_verify", AttentionConfig(unified_verify=False)).path
        'dense'
    """

    unified: bool = True
    unified_verify: bool = True
    unified_draft_extend: bool = True
    mla: bool = False
    topk: int = 1
    page_size: int = 16
    window_pool: bool = False
    kv_dtype: str = "bfloat16"

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is not field.type:
                raise TypeError(f"{field.name}: expected {field.type.__name__}, got {value!r}")
            if field.type is int and value < 1:
                raise ValueError(f"{field.name}: expected at least 1, got {value}")
        if self.kv_dtype not in STORED_DTYPES:
            raise ValueError(f"kv_dtype: expected one of {', '.join(STORED_DTYPES)}, got {self.kv_dtype!r}")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, **arguments) -> "AttentionConfig":
        """Read each setting from its argument, else from `JAXATTN_<NAME>`, else take its default.

        Args:
            environment: where the variables are; `os.environ` by default. A switch is one of 1, true, on, yes,
                0, false, off, no, in any case.
            **arguments: settings that win over the environment.

        Raises:
            ValueError: a variable does not parse, or its name looks like a misspelt setting.

        Example:
            >>> from jaxattn.routing import AttentionConfig
            >>> AttentionConfig.from_environment({"JAXATTN_UNIFIED_VERIFY": "off", "JAXATTN_TOPK": "4"}, topk=2)
            ... # doctest: +NORMALIZE_WHITESPACE
            AttentionConfig(unified=True, unified_verify=False, unified_draft_extend=True, mla=False, topk=2,
            page_size=16, window_pool=False, kv_dtype='bfloat16')
        """
        environment = os.environ if environment is None else environment
        fields = {field.name.upper(): field for field in dataclasses.fields(cls)}
        settings = {}
        for variable, text in environment.items():
            name = variable.removeprefix(_PREFIX)
            if name == variable:
                continue
            if name in fields:
                settings[fields[name].name] = _parse(variable, text, fields[name].type)
            elif meant := difflib.get_close_matches(name, fields, 1, 0.7):
                raise ValueError(f"{variable}: no such setting; did you mean {_PREFIX}{meant[0]}?")
        return cls(**settings | arguments)

    @property
    def cache_options(self) -> dict[str, Any]:
        """The arguments of `PagedKVCache.allocate` that the config decides."""
        return {"page_size": self.page_size, "dtype": jnp.dtype(self.kv_dtype)}


def route(mode: str, config: AttentionConfig) -> Route:
    """Decide which path a forward mode takes.

    Args:
        mode: one of `MODES`.
        config: the switches.

    Raises:
        ValueError: there is no such mode.

    Example:
        >>> from jaxattn.routing import AttentionConfig, route
        >>> route("decode", AttentionConfig())
        Route(path='unified', reason='unified attention covers decode')
    """
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
    if config.mla:
        return Route(
            "unsupported",
            "mla is on, and jaxattn has no kernels for multi-head latent attention yet",
        )
    if not (config.unified or config.window_pool):
        return Route("dense", "unified is off")
    if mode == "target_verify" and not config.unified_verify:
        return Route("dense", "unified_verify is off")
    if mode == "draft_extend" and not config.unified_draft_extend:
        return Route("dense", "unified_draft_extend is off")
    return Route("unified", _why_unified(mode, config))


def routing_table(config: AttentionConfig) -> dict[str, Route]:
    """Decide for every forward mode, in the order of `MODES`.

    Example:
        >>> from jaxattn.routing import AttentionConfig, routing_table
        >>> {mode: decision.path for mode, decision in routing_table(AttentionConfig(unified=False)).items()}
        ... # doctest: +NORMALIZE_WHITESPACE
        {'extend': 'dense', 'decode': 'dense', 'target_verify': 'dense', 'draft_decode': 'dense',
         'draft_extend': 'dense'}
    """
    return {mode: route(mode, config) for mode in MODES}


def _why_unified(mode: str, config: AttentionConfig) -> str:
    reason = f"unified attention covers {mode}"
    if not config.unified:
        reason += "; a window pool turns it on although unified is off"
    if config.topk > 1 and mode == "target_verify":
        reason += f", the tree of topk = {config.topk} branches as ancestor bits"
    if config.topk > 1 and mode == "draft_decode":
        reason += f", each of topk = {config.topk} branches as a sequence"
        if config.page_size > 1:
            reason += (
                f"; branches share a partly filled page of {config.page_size}, so build the table with page_size=1 "
                "and attend to view_pages(cache, 1)"
            )
    return reason


def _parse(name: str, text: str, kind: Any):
    if kind is bool:
        if text.lower() not in _TRUE + _FALSE:
            raise ValueError(f"{name}: expected one of {', '.join(_TRUE + _FALSE)}, got {text!r}")
        return text.lower() in _TRUE
    if kind is int:
        if not (text.isascii() and text.isdecimal() and int(text) >= 1):
            raise ValueError(f"{name}: expected a whole number of at least 1, got {text!r}")
        return int(text)
    if text not in STORED_DTYPES:
        raise ValueError(f"{name}: expected one of {', '.join(STORED_DTYPES)}, got {text!r}")
    return text
