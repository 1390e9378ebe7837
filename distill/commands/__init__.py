"""The commands beside the main one: each thin, arguments in, one call, text out."""
