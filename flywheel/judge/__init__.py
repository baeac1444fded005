"""The judge: an independent model behind an OpenAI-compatible endpoint, asked by a rubric."""
