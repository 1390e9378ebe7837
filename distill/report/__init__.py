"""What a run leaves for its reader: results, report, figures."""
