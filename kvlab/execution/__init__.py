"""Execution contract: the model that computes K/V rows and reads them back."""
