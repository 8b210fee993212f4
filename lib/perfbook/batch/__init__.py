"""The numbered notebooks, unattended: papermill over the sequence, one run's folder per variant."""
