"""Every error anycore raises on purpose.

Each class knows its HTTP status, its OpenAI `type` and `code`, and carries a sentence that says what to change;
the server turns any of them into the OpenAI error envelope, the CLI into one line and an exit code.
"""

from __future__ import annotations


class AnycoreError(Exception):
    """Root of the deliberate errors. `param` names the request field or the setting at fault."""

    status = 500
    type = "server_error"
    code: str | None = "internal_error"
    exit_code = 1

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    def envelope(self) -> dict[str, dict[str, str | None]]:
        """Return the OpenAI error body."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class BadRequest(AnycoreError):
    """The request is wrong; sending it again will not help."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"
    exit_code = 2


class ContextLengthExceeded(BadRequest):
    code = "context_length_exceeded"


class InvalidGrammar(BadRequest):
    """What the output was to keep to is wrong, too complex, or leaves no way on."""

    code = "invalid_grammar"


class TaskNotSupported(BadRequest):
    """The endpoint does not fit the model's task."""

    code = "task_not_supported"


class Unsupported(BadRequest):
    """No row of the capability matrix covers what was asked; the message is `declare.explain`'s."""

    code = "unsupported"
    exit_code = 3


class Unauthorized(BadRequest):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(BadRequest):
    """The key is right and may not do this."""

    status = 403
    type = "permission_error"
    code = "insufficient_scope"


class NotFound(BadRequest):
    status = 404
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class Conflict(BadRequest):
    """Something else is being done to the same thing."""

    status = 409
    code = "conflict"


class TooLarge(BadRequest):
    status = 413
    code = "request_too_large"


class Overloaded(AnycoreError):
    """The bounded queue is full. `retry_after` is in seconds."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after: int = 1
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.retry_after = retry_after


class RateLimited(Overloaded):
    """A key has used up what it may; the message names the limit and the numbers."""

    code = "rate_limit_exceeded"


class Unavailable(AnycoreError):
    """The model is loading, draining or gone; the same request may succeed later."""

    status = 503
    type = "service_unavailable_error"
    code = "unavailable"


class DeadlineExceeded(AnycoreError):
    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class NonFiniteOutput(AnycoreError):
    """The model produced NaN or infinity for this request; nothing of it is returned."""

    code = "non_finite_output"


class ConfigError(AnycoreError):
    """A setting cannot be honoured. Raised before weights are loaded."""

    type = "configuration_error"
    code = "invalid_configuration"
    exit_code = 2


class DoesNotFit(ConfigError):
    """The memory plan needs more than there is; the message gives need, have and the feasible maximum."""

    code = "does_not_fit"


class SourceError(ConfigError):
    """A model's files cannot be found or fetched."""

    code = "model_source"


class WeightsError(ConfigError):
    """Weight files are damaged or incomplete; naming the file, the expected and the real state."""

    code = "weights_damaged"
    exit_code = 1


class PluginError(ConfigError):
    """A plugin cannot be used: wrong contract version, failed import, missing driver."""

    code = "plugin"
    exit_code = 3
