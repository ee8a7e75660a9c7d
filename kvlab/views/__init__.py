"""Pure functions from plain snapshots to pictures; no view holds a live machine."""
