"""The one training loop over any engine, and what stands around it: choice, journal, samples, evaluation."""
