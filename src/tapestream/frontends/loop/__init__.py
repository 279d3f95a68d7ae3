"""`Loop`: one step applied thousands to millions of times, differentiated within a budget."""
