"""Parts: what one rank does of a step by a plan, and the parameters that it holds, by plan kind."""
