"""Where the time of a run went: a ledger in which every slot-second is booked once, and what is told from it."""
