"""Tests ask no other host for anything: a name of the hub is refused at once, not after minutes of trying."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read by huggingface_hub when it is imported
