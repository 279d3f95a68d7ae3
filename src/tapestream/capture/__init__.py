"""What a computation reads, writes, draws from and calls beside its arguments."""
