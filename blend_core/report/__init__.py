"""Finished runs on disk, gathered into tables and pictures."""
