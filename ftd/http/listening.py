"""Why ftd cannot listen at an address, in its own words: at the start and for ``ftd --check``."""

from __future__ import annotations

import errno

from ftd.config import HttpAddress, flag
from ftd.errors import AddressInUse, ConfigError, FtdError


def not_listening(address: HttpAddress, error: OSError) -> FtdError:
    where = f"{flag('http')} {address}"
    if error.errno == errno.EADDRINUSE:
        return AddressInUse(
            f"{where}: the port is taken by another process",
            hint="ftctl status shows whether it is an ftd; --http 127.0.0.1:0 takes any free port",
        )
    return ConfigError(
        f"{where}: cannot listen there: {error.strerror or error}",
        hint="use 127.0.0.1 for this machine only, 0.0.0.0 for all its addresses, or one of them",
    )
