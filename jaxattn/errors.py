"""The exceptions that `jaxattn` raises besides `ValueError`, `TypeError` and `OverflowError`."""


class JaxattnError(Exception):
    """Base class of the library's own exceptions."""


class UnsupportedError(JaxattnError, NotImplementedError):
    """An implementation cannot do what was asked; the message gathers every refusal with its reason."""


class PoolExhaustedError(JaxattnError, RuntimeError):
    """A page pool has fewer free pages than were asked for; nothing was allocated."""


class CheckpointError(JaxattnError, ValueError):
    """A model file is missing, damaged, or does not hold what its header or config declares."""
