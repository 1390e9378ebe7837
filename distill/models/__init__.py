"""Loading models, and making students."""
