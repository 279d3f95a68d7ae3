"""Where the parameters of a streamed model live, and how they get there."""
