"""The inference engine of a round, on Ray and vLLM."""
