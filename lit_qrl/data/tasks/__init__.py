"""The tasks that ship: rows, prompts and rewards of one problem set each."""
