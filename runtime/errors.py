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


class StructuredOutputError(RuntimeError):
    """A request's grammar grew too complex to be followed; that request ends, others go on."""


class StepFailedError(RuntimeError):
    """A request made a step fail, also when it ran alone; it ends, others go on. See the cause."""


class DeadlineExceededError(RuntimeError):
    """A request was ended at its deadline; it keeps the tokens that it had by then."""


class QueueFullError(RuntimeError):
    """As many requests wait as max_waiting allows; this one was not queued. Try again later."""


class EngineStateError(RuntimeError):
    """The engine can't do that now: it sleeps, lacks weights, or isn't idle. The message says what
    to do first."""


class EngineDeadError(RuntimeError):
    """The engine was shut down, or failed beyond repair: see the cause. Make a new one."""
