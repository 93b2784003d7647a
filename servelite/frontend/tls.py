"""The certificate that the server shows, where it ends TLS itself."""

from __future__ import annotations

import ssl

from servelite.config import SettingError, Settings


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """What connections are wrapped in; None: plain HTTP.

    Raises:
        SettingError: a file cannot be read, holds no certificate or no key, the two do not belong
            together, or the key is encrypted (nobody is there to be asked for its password).
    """
    if not settings.ssl_certfile:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    files = f"--ssl-certfile {settings.ssl_certfile}"
    if settings.ssl_keyfile:
        files += f", --ssl-keyfile {settings.ssl_keyfile}"
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile or None, _no_password)
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).lower().replace("_", " ")
        if not settings.ssl_keyfile:
            reason += "; a key that is in a file of its own is given with --ssl-keyfile"
        raise SettingError(f"{files}: no certificate in PEM and its key: {reason}") from None
    except (OSError, ValueError) as error:
        raise SettingError(f"{files}: {getattr(error, 'strerror', None) or error}") from None
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one without a password")
