"""Where learner and engine live."""
