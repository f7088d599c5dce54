"""Mutual TLS between services: which service calls, and which is called, is what its certificate says.

A folder holds ca.crt, tls.crt and tls.key, as a Kubernetes secret does. A certificate names its role twice: as the host
`<role>.millrace.internal`, which a caller demands of whom it dialled, whatever the address; and as the URI
`spiffe://millrace/<role>`, which a server demands of its callers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc

from services.common.errors import PermissionDenied
from services.common.lifecycle import StartupError

FILES = ("ca.crt", "tls.crt", "tls.key")
GATEWAY, ROUTER, WORKER, USAGE, OPERATOR = ROLES = ("gateway", "router", "worker", "usage", "operator")
_URI = "spiffe://millrace/"


@dataclasses.dataclass(frozen=True, slots=True)
class Tls:
    """The certificate of this process and the authority that it trusts, in PEM."""

    folder: Path
    ca: bytes
    certificate: bytes
    key: bytes = dataclasses.field(repr=False)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Serve with this certificate; callers must have one of the same authority."""
        pair = [(self.key, self.certificate)]
        return grpc.ssl_server_credentials(pair, root_certificates=self.ca, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Call with this certificate."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.certificate)


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """Who may call a server: roles by the name of the method; what is not named is refused."""

    tls: Tls
    callers: Mapping[str, tuple[str, ...]]

    def check(self, context: grpc.aio.ServicerContext[Any, Any], method: str) -> None:
        """Raise PermissionDenied when the caller's certificate names no role that may call."""
        allowed = self.callers.get(method.rpartition("/")[2], ())
        names = context.auth_context().get("x509_subject_alternative_name", ())
        if not any(name == uri_of(role).encode() for name in names for role in allowed):
            raise PermissionDenied("The caller's certificate is not of a role that may make this call.")


def load_tls(folder: str) -> Tls | None:
    """The files of a folder; None for no folder. Raises StartupError."""
    if not folder:
        return None
    try:
        ca, certificate, key = ((Path(folder) / name).read_bytes() for name in FILES)
    except OSError as error:
        raise StartupError(f"{folder}: {', '.join(FILES)} cannot be read ({error.strerror}).") from error
    return Tls(Path(folder), ca, certificate, key)


def access(tls: Tls | None, callers: Mapping[str, tuple[str, ...]]) -> Access | None:
    """Checks of a server; None without TLS."""
    return None if tls is None else Access(tls, callers)


def host_of(role: str) -> str:
    """The host name in the certificate of a role."""
    return f"{role}.millrace.internal"


def uri_of(role: str) -> str:
    """The URI in the certificate of a role."""
    return _URI + role
