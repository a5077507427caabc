"""nostall's attention kernel inside vLLM: a plug-in that vLLM finds by its entry point."""
