"""A held port is for the server that it is meant for, and for nobody else."""

from __future__ import annotations

import socket

import pytest

from demo.ports import held_port


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_server_listens_at_a_held_port(host: str) -> None:
    if ":" in host and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with held_port(host) as port:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, port))
        for _ in range(2):  # also one that is started again
            with socket.create_server((host, port), family=family) as server:
                for _ in range(20):
                    with socket.create_connection((host, port)), server.accept()[0] as accepted:
                        assert accepted.getsockname()[1] == port
                with pytest.raises(OSError, match="in use"), socket.create_server((host, port), family=family):
                    pass


def test_a_program_that_shares_no_address_cannot_have_a_held_port() -> None:
    with held_port() as port, socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
