"""File formats of others: what is read from outside is checked before memory is taken."""
