"""What was sent and what is held: ledgers of a publish, by checksum; nothing here knows an engine."""
