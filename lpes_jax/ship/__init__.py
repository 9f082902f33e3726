"""The formats of `lpes_jax.export`, one module each, which fills a folder. The folder appears whole or not at all."""
