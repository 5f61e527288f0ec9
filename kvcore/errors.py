"""Errors, drawn as a tree. A cache miss is never one of them: misses are `Status` values.

KVError
 |-- ConfigError            our user's mistake in a file, an environment variable or a flag
 |-- LocalProtocolError     our caller's mistake (a message that must not be sent now)
 |-- RemoteProtocolError    the peer sent something that cannot be understood; its connection is closed
 |-- StoreUnavailable       no connection (refused, lost, circuit open); retryable
 |-- DeadlineExceeded       no answer in time; retryable
 `-- RequestRefused         the store answered with an error (bad token, unknown message, over a limit)
"""


class KVError(Exception):
    """Base of all. `retryable` says whether the same call may succeed later without any change."""

    retryable = False


class ConfigError(KVError):
    pass


class LocalProtocolError(KVError):
    pass


class RemoteProtocolError(KVError):
    pass


class StoreUnavailable(KVError):
    retryable = True


class DeadlineExceeded(KVError):
    retryable = True


class RequestRefused(KVError):
    """`code` is one of `kvcore.wire.messages.ErrorCode`."""

    def __init__(self, code: int, message: str, retryable: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.retryable = retryable
