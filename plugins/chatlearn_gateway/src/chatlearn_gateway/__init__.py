"""A server that speaks the protocols of OpenAI and Anthropic in front of a generator, and trains on what it served."""
