"""What can be wrong with the store or with a bundle.  All of it is bad input (exit code 2)."""

from __future__ import annotations

from nostall.core.errors import BadInput


class BadStore(BadInput):
    """The store cannot be read or written, or does not hold what was asked for."""


class BadBundle(BadInput):
    """A deployment bundle is damaged, was changed, or is of another format."""
