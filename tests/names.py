"""Names of tests that are the same in every process, as running them in several processes needs.
Nothing here tests anything.
"""

from __future__ import annotations

import re
from typing import Any


def stable(value: Any) -> str:
    """The representation of a value without the addresses of objects."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
