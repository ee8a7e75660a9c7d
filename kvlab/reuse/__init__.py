"""Identity, index and isolation contracts: may these bytes be reused, and which are they."""
