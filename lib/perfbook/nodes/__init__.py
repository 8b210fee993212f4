"""Other machines of a Ray cluster as clients: how to reach them, and a load that several share."""
