"""A thin shell over the public API."""
