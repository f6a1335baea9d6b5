"""Every change to vLLM's own code, one file each, listed in `table.PATCHES` and by `lit-qrl --versions`."""
