"""The image's health check: exits 0 where the server of this container is ready, else 1 and says why."""

from __future__ import annotations

import http.client
import os
import ssl
import sys


def main() -> int:
    """Ask `/health/ready`; it needs no API key."""
    port = int(os.environ.get("SERVELITE_PORT", "8000"))
    if os.environ.get("SERVELITE_SSL_CERTFILE"):  # this very container: the name in it is another
        context = ssl._create_unverified_context()
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            "127.0.0.1", port, timeout=3, context=context
        )
    else:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=3)
    try:
        connection.request("GET", "/health/ready")
        answer = connection.getresponse()
        print(answer.status, answer.read(200).decode(errors="replace"))
    except (OSError, http.client.HTTPException) as error:
        print(f"no answer: {error!r}")
        return 1
    finally:
        connection.close()
    return 0 if answer.status == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
