"""One run's folder: provenance, records, findings, summary."""
