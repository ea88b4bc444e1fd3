"""The emulator's own tests need it from the start: `make emulate`."""

from __future__ import annotations

import sys

collect_ignore_glob = [] if "emulator.device" in sys.modules else ["test_*.py"]
