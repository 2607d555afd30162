"""The embedding engine: dynamic tables in C++, their options and optimizers, and the store protocol."""
