"""Wall: writing. Sends and counts frames: the generator, the sink, the agent that runs them."""
