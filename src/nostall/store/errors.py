"""Errors of the store and of bundles; both are bad input (exit code 2)."""

from __future__ import annotations

from nostall.core.errors import BadInput


class BadStore(BadInput):
    """The store cannot be read or written, or lacks the requested record."""


class BadBundle(BadInput):
    """A deployment bundle is damaged, was changed, or has another format."""
