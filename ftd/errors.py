"""Every error a client, file or machine can cause.

  FtdError                       code                  HTTP
  ├── ConfigError                config_invalid        400  a flag, file key or variable
  ├── AddressInUse               address_in_use        409  another process has the port or socket
  ├── CheckpointError            checkpoint_invalid    422  a model directory that cannot be served
  │   ├── ModelNotFound          model_not_found       404  no such directory, hub id or alias
  │   └── UnsupportedModel       model_unsupported     422  a model_type or format we do not have
  ├── BudgetExceeded             budget_exceeded       409  a plan that does not fit
  ├── Busy                       busy                  409  one reload, drain or load at a time
  ├── RequestInvalid             (see below)           400  one field of a request
  │   ├── ContextExceeded        context_length_exceeded 400   prompt longer than context or pool
  │   └── BodyTooLarge           request_too_large       413
  ├── Unauthorized               invalid_api_key         401
  ├── QueueFull                  rate_limit_exceeded   429  Retry-After
  ├── NotReady                   model_not_ready       503  loading, draining, failed: Retry-After
  ├── TimedOut                   timed_out             504  a command that waited long enough
  ├── LoadFailed                 load_failed           500  a model that failed after every check
  ├── RequestCancelled           request_cancelled     499  cancelled by an operator or a reload
  └── EngineFailed               engine_failed         500  a step failed; the log has the cause
      ├── ConstraintFailed       constraint_failed     500  an answer left its grammar
      ├── OutOfMemory            out_of_memory         503  a step that the GPU had no room for
      └── GpuLost                gpu_lost              500  it answers no more: only a restart helps

Our own mistakes are assertions, not errors of this tree.
"""

from __future__ import annotations


class FtdError(Exception):
    """What failed with both numbers and units, and in ``hint`` what to do about it."""

    code = "internal_error"
    status = 500

    def __init__(self, message: str, *, hint: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


def first_line(error: BaseException) -> str:
    """What an error says for people: below its first line libraries give advice to programmers."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


class ConfigError(FtdError):
    code, status = "config_invalid", 400


class AddressInUse(FtdError):
    code, status = "address_in_use", 409


class CheckpointError(FtdError):
    code, status = "checkpoint_invalid", 422


class ModelNotFound(CheckpointError):
    code, status = "model_not_found", 404


class UnsupportedModel(CheckpointError):
    code, status = "model_unsupported", 422


class BudgetExceeded(FtdError):
    code, status = "budget_exceeded", 409


class Busy(FtdError):
    code, status = "busy", 409


class RequestInvalid(FtdError):
    """A request refused before it had any effect; ``param`` names the field."""

    code, status = "invalid_value", 400

    def __init__(self, message: str, *, param: str | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.param = param


class ContextExceeded(RequestInvalid):
    """``prompt_tokens`` do not fit into ``limit_tokens``, which some settings may raise."""

    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, limit_tokens: int, *, raised_by: str) -> None:
        # This wording makes agents compact their history: keep it to the letter.
        super().__init__(
            f"This model's maximum context length is {limit_tokens} tokens. However, your messages "
            f"resulted in {prompt_tokens} tokens. Please reduce the length of the messages.",
            param="messages",
            hint=f"{raised_by} raises the limit" if raised_by else "",
        )
        self.prompt_tokens = prompt_tokens
        self.limit_tokens = limit_tokens


class BodyTooLarge(RequestInvalid):
    code, status = "request_too_large", 413


class Unauthorized(FtdError):
    code, status = "invalid_api_key", 401


class QueueFull(FtdError):
    code, status = "rate_limit_exceeded", 429


class NotReady(FtdError):
    code, status = "model_not_ready", 503


class TimedOut(FtdError):
    code, status = "timed_out", 504


class LoadFailed(FtdError):
    code, status = "load_failed", 500


class RequestCancelled(FtdError):
    code, status = "request_cancelled", 499


class EngineFailed(FtdError):
    code, status = "engine_failed", 500


class ConstraintFailed(EngineFailed):
    code, status = "constraint_failed", 500


class OutOfMemory(EngineFailed):
    code, status = "out_of_memory", 503


class GpuLost(EngineFailed):
    code, status = "gpu_lost", 500
