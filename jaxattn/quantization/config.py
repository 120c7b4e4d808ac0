"""What a checkpoint's config declares about the form of each weight, whichever method wrote it."""

import dataclasses
import fnmatch
from collections.abc import Collection

from jaxattn.errors import CheckpointError
from jaxattn.quantization.exclude import ExcludeList, shards_of, spellings

PLAIN, FP8, MXFP4 = "plain", "fp8", "mxfp4"
FORMS = (PLAIN, FP8, MXFP4)


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """The declared form of a weight or of an activation.

    `granularity` is per_tensor, per_channel (one scale a row) or per_group (32 columns share one scale);
    `dynamic` means that the scale is computed from the values at run time.
    """

    form: str
    granularity: str
    dynamic: bool


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """The declared forms of one linear layer; None for what is left in floating point."""

    weight: TensorSpec | None = None
    input: TensorSpec | None = None


@dataclasses.dataclass(frozen=True)
class Declared:
    """The form that a config declares for one module, and the entry or rule that says so."""

    form: str
    why: str
    spec: LayerSpec = LayerSpec()


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """A parsed quantisation config.

    The file has the last word on every tensor; this record supplies what it cannot say (the form of the
    activations, the KV cache dtype) and what the load report compares it with.

    Attributes:
        method: the registered name of the method.
        default: what applies to a linear layer that no rule names; None for plain.
        exclude: modules left alone.
        layer_rules: (glob, spec) pairs, the first match wins.
        type_rules: (class name, spec) pairs, asked after `layer_rules`.
        kv_cache_dtype: storage dtype of the KV cache that the checkpoint was calibrated for, or None.
        on_load: quantise plain linear weights to `default` while loading.
    """

    method: str = "none"
    default: LayerSpec | None = None
    exclude: ExcludeList = dataclasses.field(default_factory=ExcludeList)
    layer_rules: tuple[tuple[str, LayerSpec], ...] = ()
    type_rules: tuple[tuple[str, LayerSpec], ...] = ()
    kv_cache_dtype: str | None = None
    on_load: bool = False

    def declared(
        self, module: str, *, layer_type: str = "Linear", present: Collection[str] | None = None
    ) -> Declared:
        """The form declared for the weight of a module.

        Args:
            module: a module name, fused or not.
            layer_type: its class name, which `type_rules` go by.
            present: the modules that the checkpoint holds; a shard of a fused name that it lacks has no say.

        Raises:
            CheckpointError: the shards of a fused name are declared in different forms.
        """
        excluded = self.exclude.decide(module, present)
        if excluded is not None:
            return Declared(PLAIN, f"excluded by {excluded!r}")
        shards = shards_of(module, present)
        # A rule for the fused name itself; `*up_proj` is none for `gate_up_proj`.
        own = self._rule(module) is not None and not any(self._rule(shard) for shard in shards)
        if own or not shards:
            return self._declared(module, layer_type)
        verdicts = {shard: self._declared(shard, layer_type) for shard in shards}
        first = verdicts[shards[0]]
        for shard, verdict in verdicts.items():
            if verdict.spec != first.spec:
                raise CheckpointError(
                    f"{module}: expected all of its shards in one form, but the config declares {shards[0]} as "
                    f"{first.form} ({first.why}) and {shard} as {verdict.form} ({verdict.why}); they cannot be fused"
                )
        return first

    def _rule(self, module: str) -> tuple[str, LayerSpec] | None:
        names = spellings(module)
        return next(
            (
                (glob, spec)
                for glob, spec in self.layer_rules
                if any(fnmatch.fnmatchcase(n, glob) for n in names)
            ),
            None,
        )

    def _declared(self, module: str, layer_type: str) -> Declared:
        rule = self._rule(module)
        if rule is not None:
            return _from_spec(rule[1], f"layer_quant_config {rule[0]!r}")
        for name, spec in self.type_rules:
            if name == layer_type:
                return _from_spec(spec, f"layer_type_quant_config {name!r}")
        if self.default is None:
            return Declared(PLAIN, "no quantisation declared")
        return _from_spec(
            self.default, "global_quant_config" if self.method == "quark" else f"method {self.method}"
        )


def _from_spec(spec: LayerSpec, why: str) -> Declared:
    return Declared(PLAIN if spec.weight is None else spec.weight.form, why, spec)
