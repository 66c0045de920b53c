"""Wall: writing. Frames: the generator, the sink, and the agent that runs them."""
