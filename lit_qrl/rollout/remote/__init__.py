"""Engines in processes of their own: on other devices or hosts, with the learner's contract."""
