"""`lit-qrl`, with a file of what each thread is in, once a second: where a start goes whose log is silent.

    python benchmarks/sampled.py FILE fit --config …

A thread of Python's looks, not `faulthandler`, which may crash beside native code that unwinds stacks as well.
"""

import os
import runpy
import sys
import threading
import time

DEPTH = 14
"""Innermost frames that are written."""


def look(file: str) -> None:
    """Write the frames of all other threads, those that wait for work left out, until the process ends."""
    begun = time.monotonic()
    with open(file, "w") as out:
        while True:
            time.sleep(1.0)
            for thread, frame in sys._current_frames().items():
                if thread == threading.get_ident():
                    continue
                lines = []
                while frame is not None and len(lines) < DEPTH:
                    code = frame.f_code
                    if not code.co_filename.startswith("<frozen importlib"):
                        place = "/".join(code.co_filename.split("/")[-3:])
                        lines.append(f"{place}:{frame.f_lineno}:{code.co_name}")
                    frame = frame.f_back
                if not lines or lines[0].endswith(":wait"):
                    continue
                print(f"{time.monotonic() - begun:.0f} {' < '.join(lines)}", file=out, flush=True)


if __name__ == "__main__":
    place = f"{sys.argv[1]}.{os.environ.get('LOCAL_RANK', '0')}"
    threading.Thread(target=look, args=(place,), daemon=True).start()
    sys.argv = ["lit-qrl", *sys.argv[2:]]
    runpy.run_module("lit_qrl.cli", run_name="__main__", alter_sys=True)
