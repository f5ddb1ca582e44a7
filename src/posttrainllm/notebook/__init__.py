"""What a notebook shows: a run while it trains, its curves afterwards, several beside each other."""
