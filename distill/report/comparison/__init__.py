"""Runs side by side: the settings in which they differ against their results, in tables and figures."""
