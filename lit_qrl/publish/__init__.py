"""What the publisher callback is made of: source, delivery, probe, recovery, adapters beside their base."""
