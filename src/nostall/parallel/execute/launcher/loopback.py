"""Rendezvous of a run on one machine: every port is on the loopback interface.

PyTorch's own rendezvous listens on all interfaces, asks nobody for a secret, and unpickles what it
finds in its key-value store.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "nostall-loopback"
"""Name of the rendezvous in torchrun's table of backends."""
_ADDRESS = "127.0.0.1"
_BACKLOG = 1024
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class LoopbackRendezvous(RendezvousHandler):  # type: ignore[misc]
    """The rendezvous of a single agent, whose store the ranks share."""

    def __init__(self, run_id: str, timeout: timedelta) -> None:
        self.run_id, self.timeout = run_id, timeout
        self._store: TCPStore | None = None
        self._port = 0

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store at the first call; the agent is alone, so nobody is waited for."""
        if self._store is None:
            self._store = self._open()
        return RendezvousInfo(
            PrefixStore(self.run_id, self._store), 0, 1, RendezvousStoreInfo(_ADDRESS, self._port)
        )

    def _open(self) -> TCPStore:
        """A store that listens on a free port of the loopback interface."""
        with socket.socket() as listener:
            listener.bind((_ADDRESS, 0))
            listener.listen(_BACKLOG)
            self._port = listener.getsockname()[1]
            return TCPStore(
                _ADDRESS,
                self._port,
                is_master=True,
                timeout=self.timeout,
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=os.dup(listener.fileno()),
            )

    def get_backend(self) -> str:
        return BACKEND

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: there is nobody to tell."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.run_id

    def shutdown(self) -> bool:
        """Close the store."""
        self._store = None
        return True


def register() -> None:
    """Add the rendezvous to torchrun's table of backends."""
    rendezvous_handler_registry.register(BACKEND, _create)


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    seconds = parameters.get_as_int("join_timeout", 600)
    return LoopbackRendezvous(parameters.run_id, timedelta(seconds=seconds))


def use_loopback_interface(variables: Any = os.environ) -> None:
    """Let the libraries of collective calls connect over the loopback interface.

    Call it in a rank before it joins the process group.  Variables that the user has set are kept.
    """
    name = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if name is not None:
        for variable in _INTERFACE_VARIABLES:
            variables.setdefault(variable, name)
