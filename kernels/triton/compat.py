"""What jax-triton needs here: the reason where it cannot be used, and repairs of two faults in it.

Each repair asks first whether the fault is there, so it switches itself off once upstream has mended it;
`tests/test_triton_compat.py` says so when a repair is no longer needed where it was.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import os
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import jax

from jaxattn.errors import UnsupportedError

# jaxlib launches waves of 64 lanes on every AMD GPU; only CDNA has them.
CDNA = ("gfx90a", "gfx942", "gfx950")


@dataclasses.dataclass(frozen=True)
class Repair:
    """A fault of jax-triton: whether it is there, and how to mend it."""

    name: str
    is_needed: Callable[[], bool]
    apply: Callable[[], None]


def jax_triton_status() -> str | None:
    """Return why `jax_triton.triton_call` cannot be used here, or None where it can.

    Example:
        >>> from jaxattn.kernels.triton.compat import jax_triton_status
        >>> reason = jax_triton_status()
        >>> reason is None or "triton" in reason
        True
    """
    try:
        triton = installed_version("triton")
        jax_triton = installed_version("jax-triton")
    except importlib.metadata.PackageNotFoundError as error:
        return f"{error.name} is not installed; install jaxattn[triton]"
    if jax_triton < (0, 3, 1):
        return f"jax-triton {dotted(jax_triton)} is too old: 0.3.1 or newer is needed"
    if jax_triton >= (0, 4) and triton < (3, 7):
        return (
            f"jax-triton {dotted(jax_triton)} needs triton 3.7 or newer, found {dotted(triton)}; "
            "upgrade triton, or install jax-triton 0.3.1"
        )
    if not has_native_launcher():
        return (
            f"jaxlib {jax.lib.__version__} has no GPU support, so jax-triton {dotted(jax_triton)} cannot launch "
            "kernels; install jax[cuda12], jax[cuda13] or jax's ROCm plugin"
        )
    try:
        import_jax_triton()
    except ImportError as error:
        return f"jax-triton {dotted(jax_triton)} with triton {dotted(triton)} does not import: {error}"
    return None


def load_jax_triton() -> ModuleType:
    """Import jax_triton with the repairs that it needs.

    Raises:
        UnsupportedError: jax-triton cannot be used here; the text says why.
    """
    if reason := jax_triton_status():
        raise UnsupportedError(f"implementation 'triton': {reason}")
    for repair in REPAIRS:
        if repair.is_needed():
            repair.apply()
    return import_jax_triton()


def device_architecture(device: Any) -> str:
    """Name of a GPU's architecture: `gfx942` for ROCm, `sm90` for CUDA.

    Args:
        device: a `jax.Device` of a GPU.
    """
    capability = str(device.compute_capability)
    return capability.split(":")[0] if capability.startswith("gfx") else "sm" + capability.replace(".", "")


def refuse_architecture(arch: str) -> str | None:
    """Return why Triton kernels cannot run on an architecture, or None where they can.

    Example:
        >>> from jaxattn.kernels.triton.compat import refuse_architecture
        >>> refuse_architecture("gfx942"), refuse_architecture("sm90")
        (None, None)
        >>> refuse_architecture("gfx1100").split(":")[0]
        'gfx1100 is not a CDNA GPU'
    """
    if not arch.startswith("gfx") or arch in CDNA:
        return None
    return (
        f"{arch} is not a CDNA GPU: jaxlib launches waves of 64 lanes while Triton compiles RDNA for 32, so results "
        f"would be wrong; supported are {', '.join(CDNA)}"
    )


def installed_version(package: str) -> tuple[int, ...]:
    """Leading numbers of an installed package's version."""
    numbers = []
    for part in importlib.metadata.version(package).split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def dotted(version: tuple[int, ...]) -> str:
    """A version as people write it."""
    return ".".join(map(str, version))


def has_native_launcher() -> bool:
    """Whether jaxlib, or a GPU plugin of it, brings the launcher that jax-triton calls."""
    try:
        launcher = importlib.import_module("jaxlib.gpu_triton")
    except ImportError:
        return False
    return hasattr(launcher, "TritonKernelCall")


def import_jax_triton() -> ModuleType:
    """Import jax_triton, and keep the caller's `TRITON_CACHE_DIR`, which its import overwrites or deletes."""
    kept = os.environ.get("TRITON_CACHE_DIR")
    try:
        return importlib.import_module("jax_triton")
    finally:
        if kept is not None:
            os.environ["TRITON_CACHE_DIR"] = kept
        else:
            os.environ.pop("TRITON_CACHE_DIR", None)


def dead_code_rule_is_outdated() -> bool:
    """Whether jax calls dead-code rules with more arguments than jax-triton's rule takes.

    jax 0.12 passes the live inputs as well; jax-triton 0.4.1 still takes (used_outs, eqn).
    """
    partial_eval, primitive = dead_code_table()
    rule = partial_eval.dce_rules.get(primitive)
    if rule is None:
        return False
    given = len(inspect.signature(partial_eval._default_dce_rule).parameters)
    try:
        inspect.signature(rule).bind(*range(given))
    except TypeError:
        return True
    return False


def replace_dead_code_rule() -> None:
    """Register a rule that keeps the call whatever else jax passes: the equation is the last argument."""

    def keep_call(*arguments):
        equation = arguments[-1]
        return [True] * len(equation.invars), equation

    partial_eval, primitive = dead_code_table()
    partial_eval.dce_rules[primitive] = keep_call


def dead_code_table() -> tuple[ModuleType, Any]:
    """jax's module of dead-code rules, and jax-triton's primitive."""
    library = importlib.import_module("jax_triton.triton_lib")
    return importlib.import_module("jax._src.interpreters.partial_eval"), library.triton_kernel_call_p


def num_ctas_is_missing() -> bool:
    """Whether Triton's AMD backend reads `num_ctas` from metadata that jax-triton leaves empty.

    Triton 3.7 began to read it; jax-triton 0.3.1 and 0.4.1 hand over an empty dict.
    """
    try:
        backend = importlib.import_module("triton.backends.amd.compiler").HIPBackend
    except ImportError:
        return False
    if hasattr(backend.make_llir, "supplies_num_ctas"):
        return False
    return (
        'metadata["num_ctas"]' in inspect.getsource(backend.make_llir) and not jax_triton_supplies_num_ctas()
    )


def jax_triton_supplies_num_ctas() -> bool:
    """Run jax-triton's sequence of AMD stages on a recording backend, and look at the metadata it passes."""
    compile_stages = importlib.import_module("jax_triton.triton_lib").compile_ttir_to_hsaco_inplace

    class Seen(Exception):
        pass

    class Recorder:
        @staticmethod
        def make_ttir(module, metadata, options):
            return module

        make_ttgir = make_ttir

        @staticmethod
        def make_llir(module, metadata, options):
            raise Seen("num_ctas" in metadata)

    extra = len(inspect.signature(compile_stages).parameters) - 3
    try:
        compile_stages(None, Recorder, SimpleNamespace(debug=False, num_ctas=1), *[None] * extra)
    except Seen as seen:
        return bool(seen.args[0])
    return False


def supply_num_ctas() -> None:
    """Wrap Triton's AMD stage so that `num_ctas` is 1 where the caller has not set it."""
    backend = importlib.import_module("triton.backends.amd.compiler").HIPBackend
    original = backend.make_llir

    @functools.wraps(original)
    def make_llir(module, metadata, options):
        metadata.setdefault("num_ctas", 1)
        return original(module, metadata, options)

    make_llir.supplies_num_ctas = True
    backend.make_llir = staticmethod(make_llir)


REPAIRS = (
    Repair("dead-code rule", dead_code_rule_is_outdated, replace_dead_code_rule),
    Repair("num_ctas on AMD", num_ctas_is_missing, supply_num_ctas),
)
