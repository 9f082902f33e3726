"""What `lpes_jax.export` writes, one module a form: each fills a folder that appears whole or not at all."""
