"""Run folders on disk: checkpoints, records, training state, the lock."""
