"""The numbered notebooks, unattended: papermill over the sequence, one run's folder per variant."""

from perfbook.batch.campaign import Options, run_campaign

__all__ = ["Options", "run_campaign"]
