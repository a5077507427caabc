"""Messages of ptxas about lost asynchronous execution of matrix instructions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

_CODE = re.compile(r"\(?\b(C75\d\d)\b\)?")


def loss_codes(messages: Iterable[str]) -> Counter[str]:
    """Number of messages by code C75nn: serialized wgmma, injected waits and the like."""
    return Counter(code for message in messages for code in _CODE.findall(message))


def new_codes(messages: Iterable[str], original: Iterable[str]) -> Counter[str]:
    """Messages by code beyond those of the original."""
    return loss_codes(messages) - loss_codes(original)
