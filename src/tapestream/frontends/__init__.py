"""How users' programs become chains: `Chain`, `stream`."""
