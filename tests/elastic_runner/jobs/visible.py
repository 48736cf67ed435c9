"""Writes down which device is this rank's, then waits for its end, unless its attempt is the last one (TEST_LAST)."""

import os
import signal
from pathlib import Path

local, attempt = int(os.environ["LOCAL_RANK"]), int(os.environ["GOODRUN_GENERATION"])
visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
mark = Path(os.environ["TEST_DIR"]) / f"g{attempt}.l{local}"
(fresh := mark.with_name(f"new.{attempt}.{local}")).write_text(visible[local] if local < len(visible) else "")
fresh.rename(mark)
if attempt < int(os.environ["TEST_LAST"]):
    signal.pause()
