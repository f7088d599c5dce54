"""The local stack's own certificate authority: one certificate a role, made anew at each start, valid for 30 days.

For one machine. A fleet takes its certificates from its own authority, in the form that services/common/tls.py reads.
"""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.common.tls import ROLES, host_of, uri_of

LIFETIME = datetime.timedelta(days=30)
_SKEW = datetime.timedelta(minutes=5)


class DevAuthority:
    """Signs certificates; its key never leaves the process."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Millrace local authority")])
        now = datetime.datetime.now(datetime.UTC)
        builder = _certificate(self._name, self._key.public_key(), now - _SKEW, now + LIFETIME)
        builder = builder.issuer_name(self._name).add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        self.certificate = builder.sign(self._key, hashes.SHA256())

    def issue(
        self, folder: Path, role: str, lifetime: datetime.timedelta = LIFETIME, *, address: str | None = None
    ) -> Path:
        """Write ca.crt, tls.crt and tls.key of a role into `folder`, readable by its owner only; returns it.

        A negative lifetime makes a certificate that has expired. `address` is an IP address that it is valid for too.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        start = min(now, now + lifetime) - _SKEW
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Millrace {role}")])
        names: list[x509.GeneralName] = [x509.DNSName(host_of(role)), x509.UniformResourceIdentifier(uri_of(role))]
        if address is not None:
            names.append(x509.IPAddress(ipaddress.ip_address(address)))
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = _certificate(name, key.public_key(), start, now + lifetime).issuer_name(self._name)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), False)
        pem = serialization.Encoding.PEM
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        _write(folder / "ca.crt", self.certificate.public_bytes(pem))
        _write(folder / "tls.crt", builder.sign(self._key, hashes.SHA256()).public_bytes(pem))
        _write(folder / "tls.key", private)
        return folder


def issue_all(folder: Path) -> dict[str, Path]:
    """A new authority's certificates of every role, each in a folder of its own."""
    authority = DevAuthority()
    return {role: authority.issue(folder / role, role) for role in ROLES}


def _certificate(
    name: x509.Name, key: ec.EllipticCurvePublicKey, start: datetime.datetime, end: datetime.datetime
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(name).public_key(key).serial_number(x509.random_serial_number())
    return builder.not_valid_before(start).not_valid_after(end)


def _write(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(content)
