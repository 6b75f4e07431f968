"""Scripts and their modules lie side by side in profiling/, which is no package."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "profiling"))
