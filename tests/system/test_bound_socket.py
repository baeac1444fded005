"""An address that cannot be listened at is an error that names the setting."""

from __future__ import annotations

import pytest

from flywheel.errors import ReceiverError
from flywheel.system.web_server import bound_socket


def test_a_port_in_use_names_its_key() -> None:
    other = bound_socket("serve", "127.0.0.1", 0, "daemon.metrics")
    with other, pytest.raises(ReceiverError, match=r"choose another port: `daemon\.metrics`") as caught:
        bound_socket("serve", "127.0.0.1", other.getsockname()[1], "daemon.metrics")
    assert caught.value.retryable
    with pytest.raises(ReceiverError, match=r"Name an address of this machine, usually 127\.0\.0\.1: `listen`"):
        bound_socket("serve", "192.0.2.1", 0, "listen")
