"""The store's side of TLS: its certificate, and whether clients have to prove who they are."""

import ssl

from kvcore.errors import ConfigError


def server_context(cert: str, key: str, client_ca: str) -> ssl.SSLContext | None:
    """None without a certificate: then TCP is plain. `client_ca`: a file of certificates, one of which must
    have signed that of each client. ConfigError for files that cannot be used."""
    if not cert:
        if key or client_ca:
            raise ConfigError("tls_key and tls_client_ca need a tls_cert")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(cert, key or None)
        if client_ca:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        files = " or ".join(filter(None, (cert, key, client_ca)))
        raise ConfigError(f"TLS: {files} cannot be used: {error}") from error
    return context
