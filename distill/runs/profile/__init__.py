"""Where the time of a run goes: what is recorded while it trains, and the rules that name what holds it up."""
