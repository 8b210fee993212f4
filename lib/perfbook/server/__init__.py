"""Server control: what would fail, what the log says, start, watch, stop."""
