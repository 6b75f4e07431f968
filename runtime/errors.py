"""Errors that callers can act on. Broken invariants of our own are assertions instead."""


class ConfigError(ValueError):
    """An engine option or environment variable is wrong, alone or together with another."""


class InvalidRequestError(ValueError):
    """A request can't be served as asked; nothing of it was queued."""


class ModelLoadError(ValueError):
    """A checkpoint is missing, incomplete, misshapen or of a format that is not read."""


class UnsupportedModelError(ModelLoadError):
    """The checkpoint is sound but its architecture, or an option of it, is not implemented."""


class NonFiniteLogitsError(RuntimeError):
    """The model gave one sequence only NaN or infinite logits; that sequence ends, others go on."""


class LogitsProcessorError(RuntimeError):
    """A request's own logits processor failed; that request ends, others go on."""
