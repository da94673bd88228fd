"""Trackers: where else than in its own folder a run is followed, each a Lightning logger."""
